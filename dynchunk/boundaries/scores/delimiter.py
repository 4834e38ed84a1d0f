"""Delimiters: what a tokenizer, or plain bytes, tell for free about where units begin."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynchunk._checks import describe, require, require_tokens
from dynchunk.boundaries.scores.base import Score

# What a token's text says about its two ends.
_BEGINS_SPACE, _BEGINS_NEWLINE, _BEGINS_PUNCTUATION = 1, 2, 4
_ENDS_SPACE, _ENDS_NEWLINE, _ENDS_PUNCTUATION, _ENDS_SENTENCE = 8, 16, 32, 64
_ALL_SPACE = 128

_SENTENCE_ENDS = frozenset(".!?\u2026\u3002\uff01\uff1f")
_FULL_WIDTH_ENDS = frozenset("\u3002\uff01\uff1f")  # followed by no space


@dataclass(frozen=True, slots=True)
class DelimiterWeights:
    """Score of a token that begins a line, a sentence, follows punctuation, or begins a word."""

    newline: float = 4.0
    sentence: float = 3.0
    punctuation: float = 2.0
    space: float = 1.0


class DelimiterScore(Score):
    r"""High where text begins something: a line, a sentence, a clause, a word.

    A unit starts AFTER its delimiter and owns the blanks in front of it, as in the vocabularies of
    today's tokenizers (" word"); line ends belong to the line before. Blank lines and indentation
    do not start units of their own. The
    score at t reads the classes of tokens t-1 and t: ``receptive_field`` = 1. Many tokens tie; add
    a small :class:`HashScore` to order them.

    Build one with :meth:`from_bytes`, :meth:`from_tokenizer` or :meth:`from_texts`.

    Parameters
    ----------
    classes : int64 tensor [V]
        Bit set per token id, as :meth:`from_texts` makes it.
    weights : DelimiterWeights

    Examples
    --------
    >>> text = b"Yes. A new one,\n  here"
    >>> scores = DelimiterScore.from_bytes()(torch.tensor(list(text)))
    >>> [(text[t:].decode(), score) for t, score in enumerate(scores.int().tolist()) if score]
    [('Yes. A new one,\n  here', 4), (' A new one,\n  here', 3), (' new one,\n  here', 1),
     (' one,\n  here', 1), ('  here', 4)]
    """

    receptive_field = 1

    def __init__(self, classes: Tensor, weights: DelimiterWeights | None = None) -> None:
        self.classes = require_tokens("classes", classes)
        self.weights = weights or DelimiterWeights()

    @classmethod
    def from_texts(
        cls, texts: Sequence[str], weights: DelimiterWeights | None = None
    ) -> DelimiterScore:
        """Build from the text of every token id, blanks in front kept."""
        return cls(torch.tensor([_classify(text) for text in texts], dtype=torch.int64), weights)

    @classmethod
    def from_bytes(cls, weights: DelimiterWeights | None = None) -> DelimiterScore:
        """Build for text whose tokens are its bytes (0..255)."""
        ascii_texts = [chr(b) if b < 128 else "a" for b in range(256)]
        return cls.from_texts(ascii_texts, weights)

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, weights: DelimiterWeights | None = None
    ) -> DelimiterScore:
        """Build for a tokenizer of the ``tokenizers`` or ``transformers`` library.

        Raises
        ------
        TypeError
            The object cannot decode ids and say how many there are.
        """
        if not (hasattr(tokenizer, "decode") and hasattr(tokenizer, "get_vocab")):
            raise TypeError(
                "tokenizer: expected one of the tokenizers or transformers libraries (with decode "
                f"and get_vocab), got {describe(tokenizer)}"
            )
        size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        return cls.from_texts([_token_text(tokenizer.decode, i) for i in range(size)], weights)

    def check(self, tokens: object) -> Tensor:
        """Return integer token ids [T], all of them in the vocabulary."""
        ids = require_tokens("tokens", tokens)
        size = len(self.classes)
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            require(low >= 0 and high < size, "tokens", f"ids in [0, {size})", (low, high))
        return ids

    def score(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Return float32 scores [T]."""
        now = self.classes.to(tokens.device)[tokens.long()]
        # The start of a sequence counts as the start of a line.
        before = torch.where(offsets > 0, now.roll(1), _ENDS_NEWLINE | _ENDS_SPACE | _ALL_SPACE)

        def has(classes: Tensor, bit: int) -> Tensor:
            return (classes & bit) != 0

        after_space = has(before, _ENDS_SPACE)
        begins_space = has(now, _BEGINS_SPACE)
        begins_newline, is_blank = has(now, _BEGINS_NEWLINE), has(now, _ALL_SPACE)
        units = (
            (
                self.weights.newline,
                (has(before, _ENDS_NEWLINE) & ~begins_newline) | (begins_newline & ~is_blank),
            ),
            (
                self.weights.sentence,
                has(before, _ENDS_SENTENCE) & (begins_space | after_space),
            ),
            (
                self.weights.punctuation,
                has(before, _ENDS_PUNCTUATION) & ~has(now, _BEGINS_PUNCTUATION),
            ),
            (
                self.weights.space,
                (begins_space & ~after_space)
                | (after_space & ~has(before, _ALL_SPACE) & ~begins_space),
            ),
        )
        scores = torch.zeros(len(tokens), device=tokens.device)
        for weight, begins in units:
            scores = torch.where(begins, scores.clamp(min=weight), scores)
        return torch.where(begins_newline & is_blank, 0.0, scores)  # it ends the line before


def _classify(text: str) -> int:
    if not text:
        return 0
    first, last = text[0], text[-1]
    core = text.rstrip()
    final = core[-1:]
    bits = (
        _BEGINS_SPACE * first.isspace()
        | _BEGINS_NEWLINE * (first in "\r\n")
        | _BEGINS_PUNCTUATION * _is_punctuation(first)
        | _ENDS_SPACE * last.isspace()
        | _ENDS_NEWLINE * text.rstrip(" \t").endswith("\n")  # "\n    " is an indented line's start
        | _ENDS_PUNCTUATION * _is_punctuation(final)
        | _ENDS_SENTENCE * (final in _SENTENCE_ENDS)
        | _ALL_SPACE * (not core)
    )
    return bits | (_ENDS_SPACE if final in _FULL_WIDTH_ENDS else 0)


def _is_punctuation(character: str) -> bool:
    # Categories P (punctuation) and S (symbols); an underscore is part of a name.
    return character not in ("", "_") and unicodedata.category(character)[0] in "PS"


def _token_text(decode: Callable[..., str], token: int) -> str:
    """Text of one token. Decoders drop a blank in front of the first token, so decode it twice."""
    once = decode([token], skip_special_tokens=False)
    twice = decode([token, token], skip_special_tokens=False)
    return twice[len(once) :] if twice.startswith(once) else once
