"""Puts questions about images into the rows that MindSpeed-RL reads: a prompt, its image, the answer.

    python images.py SPEC.json OUT_FOLDER

A record (.json, .jsonl, .parquet) has a question, an answer and one image: bytes, or a path under the folder of its file. Its rule
rewards an answer in \\boxed{} behind thoughts in <think>; a question that does not say so is made to. A prompt that is too long with
its image stops here, and not in the middle of the training.
"""

import io
import json
import math
import sys
from pathlib import Path

QUESTIONS = ("prompt", "problem", "question")
ANSWERS = ("answer", "ground_truth", "solution", "labels")
TAG = "<image>"
ASK = "Think first, between <think> and </think>; then write the final answer in \\boxed{}."
FEWEST_PIXELS, MOST_PIXELS = 512 * 512, 2048 * 2048  # to which it brings an image
TOKEN_SIDE = 28  # pixels of an image that become one token, along each side
BATCH = 256  # rows written at once


class Unusable(Exception):
    """What is wrong with a record, or with the file."""


def records(path):
    """The records of a file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(path).iter_batches(BATCH):
            yield from batch.to_pylist()
        return
    text = path.read_text(encoding="utf-8")
    yield from json.loads(text) if text.lstrip().startswith("[") else map(json.loads, filter(str.strip, text.splitlines()))


def chat_of(record):
    """The messages of the question, with one place for the image."""
    asked = next((record[name] for name in QUESTIONS if record.get(name)), None)
    if asked is None:
        raise Unusable(f"the question is missing ({', '.join(QUESTIONS)}); name it in columns")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked if "\\boxed" in asked else f"{asked}\n{ASK}"}]
    chat = [{"role": str(message["role"]), "content": str(message["content"])} for message in asked]
    places = sum(message["content"].count(TAG) for message in chat)
    if places > 1:
        raise Unusable(f"{places} places for images; it takes one image")
    if places == 0:
        chat[-1]["content"] = TAG + chat[-1]["content"]
    return chat


def answer_of(record):
    """The solution that answers are held against."""
    rule = record.get("reward_model")
    if isinstance(rule, dict) and rule.get("ground_truth") is not None:
        return str(rule["ground_truth"])
    answer = next((record[name] for name in ANSWERS if record.get(name) is not None), None)
    if answer is None:
        raise Unusable(f"the answer is missing ({', '.join(ANSWERS)}); name it in columns")
    return str(answer)


def image_of(record, folder):
    """The bytes of the one image."""
    found = record.get("images") or record.get("image")
    found = found if isinstance(found, list) else [found]
    if len(found) != 1 or not found[0]:
        raise Unusable(f"{sum(map(bool, found))} images; it takes one image (images or image)")
    image = found[0]
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str) or not (folder / image).is_file():
        raise Unusable(f"no image at {image}")
    return (folder / image).read_bytes()


def image_tokens(data):
    """Tokens of an image as it will be seen: brought between the two sizes, then cut into squares."""
    from PIL import Image

    width, height = Image.open(io.BytesIO(data)).size
    for limit, is_outside in ((MOST_PIXELS, width * height > MOST_PIXELS), (FEWEST_PIXELS, width * height < FEWEST_PIXELS)):
        if is_outside:
            factor = math.sqrt(limit / (width * height))
            width, height = int(width * factor), int(height * factor)
    return max(1, round(width / TOKEN_SIDE)) * max(1, round(height / TOKEN_SIDE))


def row_of(record, number, folder, tokenizer, most_tokens):
    """A record as it is written."""
    chat, image = chat_of(record), image_of(record, folder)
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False).replace(TAG, "")
    num_tokens = len(tokenizer(text)["input_ids"]) + 2 + image_tokens(image)  # two stand around an image
    if num_tokens > most_tokens:
        raise Unusable(f"its prompt has {num_tokens} tokens with the image, more than {most_tokens}; raise objective.max_prompt_tokens")
    facts = {"index": number, "split": "train", "answer": answer_of(record)}
    return {"prompt": chat, "images": [{"bytes": image, "path": None}], "extra_info": facts}


def write(rows, path):
    """Writes rows as they come; returns how many."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    facts = pa.struct([("index", pa.int64()), ("split", pa.string()), ("answer", pa.string())])
    schema = pa.schema([("prompt", pa.list_(message)), ("images", pa.list_(image)), ("extra_info", facts)])
    held, count = [], 0
    with pq.ParquetWriter(path, schema) as out:
        for row in rows:
            held.append(row)
            count += 1
            if len(held) == BATCH:
                out.write_table(pa.Table.from_pylist(held, schema))
                held = []
        if held:
            out.write_table(pa.Table.from_pylist(held, schema))
    return count


def main():
    """Rewrites the file that the spec names; exit code 2 with one line on stderr for what the person can mend."""
    from transformers import AutoTokenizer

    spec, folder = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    source, tokenizer = Path(spec["path"]).expanduser(), AutoTokenizer.from_pretrained(spec["model"])
    folder.mkdir(parents=True, exist_ok=True)

    def rows():
        for number, record in enumerate(records(source)):
            named = {**record, **{ours: record.get(theirs) for ours, theirs in spec["columns"].items()}}
            try:
                yield row_of(named, number, source.parent, tokenizer, spec["prompt_tokens"])
            except Unusable as why:
                raise Unusable(f"record {number + 1}: {why}") from None

    try:
        count = write(rows(), folder / "train.parquet")
        if not count:
            raise Unusable("it holds no record")
    except Unusable as why:
        print(f"error: {source}: {why}", file=sys.stderr)
        return 2
    print(f"data: {count} questions with an image")
    return 0


if __name__ == "__main__":
    sys.exit(main())
