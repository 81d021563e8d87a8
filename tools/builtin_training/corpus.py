"""The text: how it is cleaned, cut into scenes, and split into train, dev and test."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Scenes (or sonnets, or parts of a poem) by split, in the order of the book."""

    train: list[str]
    dev: list[str]
    test: list[str]


def read_corpus(path: Path) -> Corpus:
    """Reads the complete works and splits them by scene.

    Cleaning: tables of contents go (they repeat the headings of held-out scenes), and so do margin line numbers.
    Split: of every 40 scenes, numbers 7 and 27 are test (5 %), number 17 is dev (2.5 %), the others train.
    """
    scenes: list[list[str]] = [[]]
    in_contents = False
    lines = [re.sub(r"(?<=[A-Za-z]) +\d+$", "", line.strip()) for line in path.read_text("utf-8").split("\n")]
    for i, line in enumerate(lines):
        if line == "Contents":
            in_contents = True
            title = scenes[-1].pop()
            scenes.append([title])
        elif line.startswith("Dramatis"):
            in_contents = False
        if in_contents or not line:
            continue
        after_act = i > 0 and lines[i - 1].startswith("ACT ")
        starts = re.match(r"(ACT [IV]+|SCENE [IVX]+|PROLOGUE|EPILOGUE|INDUCTION)\b|\d+$", line)
        if (starts and not after_act) or sum(map(len, scenes[-1])) > 20000:
            scenes.append([])
        scenes[-1].append(line)
    texts = ["\n".join(scene) for scene in scenes if scene]
    held_out = {7: "test", 27: "test", 17: "dev"}
    parts: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for i, text in enumerate(texts):
        parts[held_out.get(i % 40, "train")].append(text)
    return Corpus(**parts)


def split_speeches(scene: str) -> list[tuple[str, list[str]]]:
    """Returns ``(speaker, lines)`` of a scene; stage directions that open or close a speech are left out."""
    speeches: list[tuple[str, list[str]]] = []
    for line in scene.split("\n"):
        if re.fullmatch(r"[A-Z0-9][A-Z ]+", line) and not re.match(
            r"(ACT|SCENE|THE|PROLOGUE|EPILOGUE)\b", line
        ):
            speeches.append((line, []))
        elif speeches:
            speeches[-1][1].append(line)
    direction = re.compile(r"(Enter|Exit|Exeunt|Flourish|Re-?enter|Alarum|SCENE|ACT|Dies|Sennet)\b")
    for _, lines in speeches:
        while lines and direction.match(lines[-1]):
            lines.pop()
        while lines and direction.match(lines[0]):
            lines.pop(0)
    return [speech for speech in speeches if speech[1]]
