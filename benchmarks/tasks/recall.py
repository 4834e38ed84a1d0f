"""Documents of the task ``dynchunk_recall``: generated, so that nothing is downloaded."""

import random

import datasets

PLACES = "harbour valley castle garden bridge market forest island temple quarry".split()
COLOURS = "amber crimson indigo ivory scarlet silver violet golden emerald copper".split()
FILLER = "The road goes on past the old mill. Rain fell most of the week. Nobody was about. ".split(
    ". "
)
PHASES = 8


def make(records: int = 12, filler: int = 20, documents: int = 32, **metadata: object):
    """Return the documents: ``records`` codes among ``filler`` sentences, one of them asked for.

    ``simple_evaluate(.., metadata={"records": 40})`` makes longer ones.
    """
    return {
        "test": datasets.Dataset.from_list([_one(i, records, filler) for i in range(documents)])
    }


def _one(number: int, records: int, filler: int) -> dict[str, str]:
    draw = random.Random(number)
    keys = draw.sample([f"{colour} {place}" for colour in COLOURS for place in PLACES], records)
    codes = {key: str(draw.randrange(1000, 10_000)) for key in keys}
    lines = [f"The code of the {key} is {code}." for key, code in codes.items()]
    lines += [f"{draw.choice(FILLER).rstrip('. ')}." for _ in range(filler)]
    draw.shuffle(lines)
    asked = draw.choice(keys)
    blanks = " " * (number % PHASES)
    text = f"{blanks}{' '.join(lines)}\nQuestion: What is the code of the {asked}?\n"
    return {"text": f"{text}Answer: The code of the {asked} is", "answer": f" {codes[asked]}"}
