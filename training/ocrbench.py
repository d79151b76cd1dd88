"""Painted pictures as OCRBench has them: `python -m training.ocrbench DIRECTORY [COUNT]`.

Writes COUNT pictures (200) and questions.jsonl beside them, for `epd bench accuracy`.
"""

import json
import sys
from pathlib import Path

from training.tasks import fresh_samples

OF_ONE = ("single", "total", "small", "lines", "meter")  # tasks of one picture and one turn


def write(directory: Path, count: int) -> Path:
    """The file of questions."""
    directory.mkdir(parents=True, exist_ok=True)
    each = {task: iter(fresh_samples(task, -(-count // len(OF_ONE)))) for task in OF_ONE}
    lines = []
    for number in range(count):
        task = OF_ONE[number % len(OF_ONE)]
        sample = next(each[task])
        name = f"{number:04}.png"
        sample.images[0].save(directory / name)
        line = {"dataset_name": task, "image_path": name, "question": sample.question}
        lines.append(json.dumps(line | {"answers": [sample.answer]}))
    file = directory / "questions.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


if __name__ == "__main__":
    print(write(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200))
