"""Writes a synthetic instruction set in the Alpaca format: English, short, the same for the same seed and size.

    python benchmarks/alpaca.py FILE NUM_SAMPLES [--seed 0] [--median-tokens 37] [--spread 1.0]

Every sentence is drawn from templates and word lists of our own. Lengths follow those of well-known instruction sets:
a question of 8 to 25 tokens, in a third of the samples an extra input, and an answer whose length is log-normal.
With the defaults a sample has 108 tokens on average and a padded batch of four 1.64 times its real tokens; with
`--median-tokens 67 --spread 1.5` it is 182 and 1.9, close to LLaMA-Factory's English Alpaca demo (187 and 2.01).
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

TOPICS = (
    """
    solar panels, city gardens, sourdough bread, night trains, public libraries, coral reefs, wool sweaters, river floods, bicycle lanes,
    chess openings, mountain huts, honey bees, wind turbines, old maps, school lunches, water tanks, paper recycling, jazz pianists,
    desert plants, ferry boats, stone bridges, apple orchards, video calls, weather balloons, hand puppets, glass bottles, street markets,
    migrating birds, folk songs, wooden toys, tide tables, cheese making
""".replace("\n    ", " ")
    .strip()
    .split(", ")
)
PEOPLE = ("a student", "a new colleague", "my neighbour", "a ten-year-old", "a tourist", "a farmer", "a busy manager", "a retired teacher")
TASKS = (
    "Explain {topic} to {person}.",
    "List {count} facts about {topic}.",
    "Write a short note on {topic} for {person}.",
    "What should {person} know about {topic}?",
    "Compare {topic} with {other}.",
    "Give {count} reasons to care about {topic}.",
    "Describe how {topic} changed over the last {count} years.",
    "Suggest a title for an essay about {topic}.",
    "Write a polite question that {person} could ask about {topic}.",
    "Summarise the passage in your own words.",
    "Rewrite the sentence so that {person} understands it.",
    "Name one advantage and one drawback of {topic}.",
)
SENTENCES = (
    "Many people think of {topic} as something simple, but {other} show how much depends on details.",
    "In practice {topic} need patience, a little money and someone who looks after them.",
    "The first records of {topic} are about {number} years old.",
    "A good start is to visit a place where {topic} and {other} are part of daily life.",
    "Experts disagree on the price, yet most estimates lie near {number} coins a year.",
    "This is why {person} may find {topic} more useful than {other}.",
    "Compared with {other}, they take less room and last roughly {count} times as long.",
    "On a cold morning the difference is easy to see.",
    "It also helps to keep notes, because small changes are easily forgotten.",
    "If something goes wrong, stop, measure again and ask for advice.",
    "For example, a town of {number} people tried it and saved a tenth of its costs.",
    "They are quiet, cheap and pleasant to look at.",
    "Nobody knows exactly why, although the weather certainly plays a part.",
    "As a rule, {count} small steps work better than one large step.",
    "The result is worth the effort.",
    "Start early, check twice and share what you learn with {person}.",
)
TOKENS_A_SENTENCE = 15  # mean length of SENTENCES
MAX_ANSWER_TOKENS = 460.0


def fill(template: str, draw: random.Random) -> str:
    """A template with its blanks filled at random."""
    return template.format(
        topic=draw.choice(TOPICS),
        other=draw.choice(TOPICS),
        person=draw.choice(PEOPLE),
        count=draw.randint(2, 9),
        number=draw.randint(20, 9000),
    )


def passage(num_sentences: int, draw: random.Random) -> str:
    """Some sentences in a row, the first letter of each a capital."""
    texts = (fill(draw.choice(SENTENCES), draw) for _ in range(num_sentences))
    return " ".join(text[0].upper() + text[1:] for text in texts)


def samples(num_samples: int, seed: int = 0, median_tokens: float = 37.0, spread: float = 1.0) -> Iterator[dict[str, str]]:
    """Alpaca records: instruction, input, output; `spread` is the standard deviation of the logarithm of an answer's length."""
    draw = random.Random(seed)
    for _ in range(num_samples):
        answer_tokens = min(MAX_ANSWER_TOKENS, draw.lognormvariate(math.log(median_tokens), spread))
        yield {
            "instruction": fill(draw.choice(TASKS), draw),
            "input": passage(draw.randint(1, 2), draw) if draw.random() < 0.33 else "",
            "output": passage(max(1, round(answer_tokens / TOKENS_A_SENTENCE)), draw),
        }


def write(path: Path, num_samples: int, seed: int = 0, median_tokens: float = 37.0, spread: float = 1.0) -> None:
    """Writes JSONL; an existing file is replaced."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(sample) + "\n" for sample in samples(num_samples, seed, median_tokens, spread))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("num_samples", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--median-tokens", type=float, default=37.0, help="of an answer")
    parser.add_argument("--spread", type=float, default=1.0)
    args = parser.parse_args()
    write(args.file, args.num_samples, args.seed, args.median_tokens, args.spread)


if __name__ == "__main__":
    main()
