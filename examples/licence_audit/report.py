"""The audit's report, as Markdown. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from examples.licence_audit.licences import Category, Finding

_KEEPS = (
    "Rests on what each distribution says of itself: its metadata and the licence texts it ships. Not legal advice."
)


@dataclass(frozen=True)
class Review:
    """What people said to the packages that somebody had to look at."""

    asked: list[str]
    accepted: list[str] = field(default_factory=list)
    approved: bool = True
    by: str | None = None
    comment: str | None = None


def tally(findings: Iterable[Finding]) -> dict[Category, int]:
    """Return how many findings there are of each category, all categories, in their order."""
    counted = Counter(finding.category for finding in findings)
    return {category: counted[category] for category in Category}


def draft(findings: Sequence[Finding], *, environment: str, at: str) -> str:
    """Return the report before anybody has looked at it."""
    concerns = [finding for finding in findings if finding.concern]
    lines = [
        "# Licence audit",
        "",
        f"{len(findings)} distributions, installed in {environment}; audited {at}.",
        _KEEPS,
        "",
        "## Summary",
        "",
        *_table(("licence", "distributions"), [(each, str(count)) for each, count in tally(findings).items() if count]),
        "",
        "## To be looked at",
        "",
    ]
    if not concerns:
        lines += ["Nothing: every licence is known and permissive.", ""]
    for finding in concerns:
        lines += [f"### {_cell(f'{finding.package} {finding.version}')}", "", f"**{_cell(finding.concern or '')}**", ""]
        lines += [f"- {_cell(each)}" for each in finding.evidence]
        lines += [""]
    rows = [
        (finding.package, finding.version, finding.licence, finding.category, ", ".join(finding.bundled))
        for finding in findings
    ]
    lines += ["## All distributions", ""]
    lines += _table(("distribution", "version", "licence", "category", "also bundles code under"), rows)
    return "\n".join([*lines, ""])


def final(drafted: str, review: Review) -> str:
    """Return the report with what people said."""
    lines = ["## Review", ""]
    if not review.asked:
        lines.append("Nobody had to be asked.")
    else:
        lines += [f"Reviewed by {_cell(review.by or 'nobody')}.", ""]
        if review.comment:
            lines += [f"> {_cell(review.comment)}", ""]
        rows = [(name, "accepted" if name in review.accepted else "**not accepted**") for name in review.asked]
        lines += _table(("distribution", "verdict"), rows)
    return "\n".join([drafted, *lines, ""])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows),
    ]


def _cell(text: str) -> str:
    """Return a text that metadata may have filled with anything as one line that breaks no table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
