"""What the rewrites of a model did, for people. Knows no module."""

from dataclasses import dataclass, field


@dataclass
class RewriteReport:
    """What was rewritten.

    Attributes:
        counts: modules rewritten, by the rewrite's name.
        skipped: why modules were left alone, by the rewrite's name.
    """

    counts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def count(self, name: str) -> None:
        """One more module was rewritten."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def __str__(self) -> str:
        done = [f"{name} {count}" for name, count in self.counts.items()]
        left = [f"{name} left alone ({reason})" for name, reason in self.skipped.items()]
        return ", ".join(done + left) or "nothing rewritten"
