"""How a fact is told and asked for. A question repeats what stood before the value in the document, or nearly so, and its answer is
the value: what a base model can do as well as one that was trained on instructions.

    lines        Ada: amber                          Ada:
    sentences    The word of Ada is amber.           The word of Ada is
    code         ada = "amber"                       assert ada == "
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Form:
    """Templates of `str.format`; they know `{name}`, `{variable}` (the name in lower case), `{value}` and `{sentence}`."""

    name: str
    fact: str
    """One line of the document."""
    question: str
    """Continues the document right up to the answer."""
    answer: str
    """Holds its leading space where words have one, so that its tokens are those that stand in the document."""
    end: str = ""
    """What follows an answer in a text that tells it."""
    filler: str = "{sentence}"
    """One line between the facts."""

    def tell(self, name: str, value: str) -> str:
        return self.fact.format(name=name, variable=name.lower(), value=value)

    def ask(self, name: str) -> str:
        return self.question.format(name=name, variable=name.lower())

    def say(self, value: str) -> str:
        return self.answer.format(value=value)

    def between(self, sentence: str) -> str:
        return self.filler.format(sentence=sentence)


LINES = Form("lines", fact="{name}: {value}", question="\n{name}:", answer=" {value}")
SENTENCES = Form(
    "sentences", fact="The word of {name} is {value}.", question="\nThe word of {name} is", answer=" {value}", end="."
)
CODE = Form(
    "code",
    fact='{variable} = "{value}"',
    question='\nassert {variable} == "',
    answer="{value}",
    end='"',
    filler="# {sentence}",
)
FORMS = {form.name: form for form in (LINES, SENTENCES, CODE)}
