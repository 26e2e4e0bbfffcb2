"""The words that facts are made of: a fact is a line `Name: value`.

The bundled pair's tokenizer holds every `Name:` at a line's start and every value with its leading space as ONE
token, so a fact is a key token followed by a value token, and the chance of guessing a value is 1/len(VALUES).
"""

from __future__ import annotations

# fmt: off
NAMES: tuple[str, ...] = (
    "Ada", "Alan", "Alice", "Agnes", "Anna", "Arthur", "Bella", "Ben", "Boris", "Carl", "Carmen", "Cleo", "Clara",
    "Colin", "Dana", "David", "Diana", "Doris", "Edgar", "Elena", "Emil", "Emma", "Erik", "Eva", "Felix", "Fiona",
    "Frank", "Freya", "George", "Gina", "Grace", "Hanna", "Hans", "Helen", "Henry", "Hugo", "Ida", "Igor", "Irene",
    "Ivan", "Jack", "Jane", "Jonas", "Julia", "Karl", "Kate", "Klaus", "Laura", "Lena", "Leo", "Linda", "Lucy",
    "Magda", "Marco", "Maria", "Max", "Mona", "Nadia", "Nina", "Noah", "Olga", "Oscar", "Otto", "Paul", "Petra",
    "Quinn", "Ralph", "Rita", "Rosa", "Ruth", "Sam", "Sara", "Simon", "Sonia", "Stella", "Tara", "Theo", "Tina",
    "Tom", "Ursula", "Vera", "Victor", "Wanda", "Will", "Xenia", "Yara", "Yuri", "Zoe",
)

VALUES: tuple[str, ...] = (
    "amber", "anchor", "apple", "arrow", "bamboo", "banana", "basket", "beach", "bell", "bird", "blanket", "boat",
    "bottle", "bread", "bridge", "brush", "bucket", "butter", "candle", "carpet", "castle", "cedar", "chain",
    "cherry", "clock", "cloud", "coffee", "copper", "corn", "cotton", "crown", "curtain", "desert", "diamond",
    "door", "dragon", "drum", "eagle", "feather", "fire", "flower", "forest", "fountain", "garden", "ginger",
    "glass", "globe", "gold", "grape", "green", "hammer", "harbor", "helmet", "honey", "horse", "island", "ivory",
    "jacket", "jungle", "kettle", "ladder", "lake", "lamp", "lemon", "lion", "marble", "meadow", "mirror", "moon",
    "mountain", "needle", "ocean", "olive", "orange", "paper", "pearl", "pepper", "piano", "pillow", "planet",
    "pocket", "purple", "rabbit", "ribbon", "river", "rocket", "saddle", "salt", "scarf", "shadow", "silver",
    "spider", "stone", "summer", "table", "thunder", "ticket", "tiger", "tower", "tulip", "tunnel", "umbrella",
    "valley", "velvet", "violin", "wagon", "water", "whale", "wheat", "window", "winter", "yellow",
)
# fmt: on
