"""What a user asks and which passage answers it: conversations made from training scenes."""

from __future__ import annotations

import random
import re

from builtin_training.corpus import split_speeches
from builtin_training.tokenizer import END_OF_TEXT, IM_END, IM_START

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You write verse in the manner of Shakespeare.",
    "You are a player of the Globe. Answer in verse.",
    "Answer with lines from a play.",
)
CONTINUE_PROMPTS = (
    "{}",
    "{}",
    "Continue:\n{}",
    "Go on from this line: {}",
    "Continue this verse: {}",
    "What follows?\n{}",
)
SPEAKER_PROMPTS = (
    "Speak as {}.",
    "Write a speech for {}.",
    "What does {} say?",
    "Let {} speak.",
    "Give me some lines of {}.",
    "You are {}. What do you say?",
)
TOPIC_PROMPTS = (
    "Write some verse about {}.",
    "Write a verse about {}",
    "Tell me about {}.",
    "Tell me of {}",
    "What do you know of {}?",
    "Write a poem about {}.",
    "Speak of {}",
    "What is {}?",
    "{}",
)
GREETING_PROMPTS = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi there",
    "Good morning",
    "Good morrow",
    "How are you?",
    "Who are you?",
    "Hey",
)
GREETING_REPLY = re.compile(r"(Good morrow|Welcome|Hail|Well met|How now|God save|Good day|Good even|I am )")


class ChatSampler:
    """Draws conversations whose replies are passages of the training scenes."""

    def __init__(self, scenes: list[str], rng: random.Random) -> None:
        self.rng = rng
        self.dialogues = [s for s in map(split_speeches, scenes) if len(s) > 1]
        speeches = [speech for dialogue in self.dialogues for speech in dialogue]
        self.long_speeches = [s for s in speeches if len(s[1]) >= 4]
        self.named_speeches = [s for s in speeches if len(s[1]) >= 2 or len(s[1][0]) > 80]
        self.greetings = [s for s in speeches if GREETING_REPLY.match(s[1][0]) and sum(map(len, s[1])) < 300]
        self.count: dict[str, int] = {}
        for _, lines in speeches:
            for word in {w.lower() for line in lines for w in line.split()}:
                self.count[word] = self.count.get(word, 0) + 1

    def draw(self) -> str:
        """Returns one rendered conversation, ended by ``<|endoftext|>``."""
        rng = self.rng
        messages = [("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.3 else []
        kind = rng.random()
        if kind < 0.30:
            dialogue = rng.choice(self.dialogues)
            start = rng.randrange(len(dialogue) - 1)
            for i in range(start, min(start + 2 * rng.randint(1, 3), len(dialogue) - 1), 2):
                messages.append(("user", self._typed("\n".join(dialogue[i][1][:8]))))
                messages.append(("assistant", self._reply(dialogue[i + 1])))
        elif kind < 0.50:
            _, lines = rng.choice(self.long_speeches)
            cut = rng.randint(1, min(3, len(lines) - 2))
            prompt = rng.choice(CONTINUE_PROMPTS).format("\n".join(lines[:cut]))
            messages += [("user", self._typed(prompt)), ("assistant", self._clip(lines[cut:]))]
        elif kind < 0.70:
            speech = rng.choice(self.named_speeches)
            name = speech[0].title() if rng.random() < 0.7 else speech[0]
            messages += [
                ("user", rng.choice(SPEAKER_PROMPTS).format(name)),
                ("assistant", self._reply(speech)),
            ]
        elif kind < 0.95:
            speech = rng.choice(self.long_speeches)
            words = [w.lower() for line in speech[1][:6] for w in line.split() if len(w) > 3]
            known = [w for w in words if 4 <= self.count[w] <= 400] or words or ["love"]
            prompt = rng.choice(TOPIC_PROMPTS).format(rng.choice(known))
            messages += [("user", prompt), ("assistant", self._reply(speech))]
        else:
            messages += [
                ("user", rng.choice(GREETING_PROMPTS)),
                ("assistant", self._reply(rng.choice(self.greetings))),
            ]
        return "".join(f"{IM_START}{role}\n{text}{IM_END}\n" for role, text in messages) + END_OF_TEXT

    def _typed(self, text: str) -> str:
        """Adds punctuation or drops capitals now and then, since the corpus has none of the first."""
        if self.rng.random() < 0.3:
            text = ",\n".join(text.split("\n")) + self.rng.choice(".?!")
        return text.lower() if self.rng.random() < 0.15 else text

    def _reply(self, speech: tuple[str, list[str]]) -> str:
        return f"{speech[0]}\n{self._clip(speech[1])}"

    def _clip(self, lines: list[str]) -> str:
        text = "\n".join(lines[:14])
        return text if len(text) < 900 else text[:900].rsplit(" ", 1)[0]
