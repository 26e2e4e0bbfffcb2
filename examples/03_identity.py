"""Keys: what makes two pages the same page, and what keeps them apart."""

from moonpool import KVIdentity, PageKey

large = KVIdentity(model="large", revision="r1", tokenizer="t", layer_end=8, page_size=4)
small = KVIdentity(model="small", revision="r1", tokenizer="t", layer_end=5, page_size=4)
tokens = list(range(10))

a, b = large.page_keys(tokens), small.page_keys(tokens)
print(len(a), "full pages of", len(tokens), "tokens")
print("same tokens, same block hash:", a[0].block == b[0].block)
print("other model, other key:", a[0].text != b[0].text)
print("the source page of a target page:", b[1].of(large.digest()) == a[1])

salted = KVIdentity(model="large", revision="r1", tokenizer="t", layer_end=8, page_size=4, salt="alice")
print("another salt, other keys:", not {k.text for k in salted.page_keys(tokens)} & {k.text for k in a})

approximate = b[1].converted("0123456789abcdef" * 2)
print(approximate.text)
print(PageKey.parse(approximate.text) == approximate, PageKey.parse("somebody else's key"))
