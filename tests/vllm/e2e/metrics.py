"""Figures of a server, from its /metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


class Metrics:
    """What one scrape said."""

    def __init__(self, text: str):
        self.samples: dict[str, list[Sample]] = {}
        for line in text.splitlines():
            if found := _LINE.match(line):
                name, labels, value = found.groups()
                sample = Sample(name, dict(_LABEL.findall(labels or "")), float(value))
                self.samples.setdefault(name, []).append(sample)

    def has(self, name: str) -> bool:
        return name in self.samples

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series with these labels; 0 without any."""
        wanted = labels.items()
        return sum(sample.value for sample in self.samples.get(name, []) if wanted <= sample.labels.items())

    def quantile(self, name: str, share: float, since: Metrics | None = None) -> float | None:
        """The bound of the histogram's bucket that holds this share of the samples (since another scrape)."""
        counts: dict[float, float] = {}
        for sign, metrics in ((1, self), (-1, since)):
            for sample in metrics.samples.get(f"{name}_bucket", []) if metrics else []:
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0) + sign * sample.value
        everything = counts.get(float("inf"), 0)
        if everything <= 0:
            return None
        return min(bound for bound, count in counts.items() if count >= share * everything)

    def mean(self, name: str, since: Metrics | None = None) -> float | None:
        count = self.total(f"{name}_count") - (since.total(f"{name}_count") if since else 0)
        if count <= 0:
            return None
        return (self.total(f"{name}_sum") - (since.total(f"{name}_sum") if since else 0)) / count
