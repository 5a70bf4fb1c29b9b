"""The questions in the order in which they are asked."""

from __future__ import annotations

from typing import Final

from bench.questions import connections, delivery, durability, filling, grey, scale, serving, stages
from bench.questions.base import Question

QUESTIONS: Final[dict[str, Question]] = {
    question.name: question
    for question in (
        *delivery.QUESTIONS,
        *serving.QUESTIONS,
        *connections.QUESTIONS,
        *filling.QUESTIONS,
        *grey.QUESTIONS,
        *durability.QUESTIONS,
        *scale.QUESTIONS,
        *stages.QUESTIONS,
    )
}
