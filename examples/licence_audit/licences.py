"""What licence a distribution is under, judged from what it says of itself. Pure: texts in, a finding out.

A distribution speaks in up to four places: the `License-Expression` of its metadata (an SPDX expression), the older
`License` field (anything), its classifiers (a fixed list), and the licence files that it ships. Each place is read into
a `Statement`: which licences it names and how far what they ask reaches. The first place that says something leads,
and the others must not contradict it:

* a place that names none of the licences that the leading one names contradicts it (MIT here, Apache there);
* so does one that names a further licence which asks for more (an MIT package with the text of the GPL in it).

One that names a further licence which asks for no more does not: a permissive package may well ship the permissive
licence of some code that it took over. When in doubt a person is asked, so the classifier never rounds down: where
several licences apply at once the strictest counts, and what it does not know is unknown, not permissive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Category(StrEnum):
    """How far what a licence asks for reaches."""

    PERMISSIVE = "permissive"
    WEAK = "weak copyleft"
    STRONG = "strong copyleft"
    UNKNOWN = "unknown"
    CONTRADICTORY = "contradictory"


@dataclass(frozen=True)
class LicenceFile:
    """A licence file: which licences' texts were recognised in it."""

    path: str
    licences: list[str]
    bundled: bool = False
    """It belongs to a third party's code inside the distribution, not to the distribution itself."""


@dataclass(frozen=True)
class Evidence:
    """All that a distribution says about its licence."""

    package: str
    version: str
    expression: str | None = None
    free_text: str | None = None
    classifiers: list[str] = field(default_factory=list)
    files: list[LicenceFile] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """The judgement on one distribution, with what it rests on."""

    package: str
    version: str
    category: Category
    licence: str
    evidence: list[str]
    contradictions: list[str] = field(default_factory=list)
    bundled: list[str] = field(default_factory=list)
    """Licences of third parties' code inside it."""

    @property
    def concern(self) -> str | None:
        """Why a person has to look at it; None when nobody has to."""
        if self.contradictions:
            return f"contradictory: {'; '.join(self.contradictions)}"
        if self.category is not Category.PERMISSIVE:
            return f"{self.category}: {self.licence}"
        if strict := [each for each in self.bundled if category_of(each) is not Category.PERMISSIVE]:
            worst = max(map(category_of, strict), key=_RANK.__getitem__)
            return f"bundles {worst}: {', '.join(strict)}"
        return None


@dataclass(frozen=True)
class Licence:
    """A licence. Those of one family are the same for an audit: BSD-2-Clause and "BSD", GPL-2.0 and GPL-3.0."""

    id: str
    family: str
    category: Category


@dataclass(frozen=True)
class Statement:
    """What one place says."""

    licences: tuple[Licence, ...]
    category: Category

    @property
    def families(self) -> set[str]:
        """The families it names."""
        return {licence.family for licence in self.licences}

    def __str__(self) -> str:
        return ", ".join(licence.id for licence in self.licences)


# --- the licences -----------------------------------------------------------------------------------------------------

_RANK = {Category.PERMISSIVE: 0, Category.WEAK: 1, Category.STRONG: 2, Category.UNKNOWN: 3}

# SPDX identifiers by category and family; the first of a family stands for "some version of it".
_FAMILIES = {
    Category.PERMISSIVE: {
        "MIT": "MIT MIT-0 X11",
        "BSD": "BSD BSD-1-Clause BSD-2-Clause BSD-2-Clause-Patent BSD-3-Clause BSD-3-Clause-Clear BSD-4-Clause",
        "Apache": "Apache Apache-1.1 Apache-2.0",
        "ISC": "ISC",
        "0BSD": "0BSD",
        "PSF": "PSF PSF-2.0 Python-2.0 Python-2.0.1 CNRI-Python",
        "HPND": "HPND MIT-CMU",
        "Zlib": "Zlib",
        "Boost": "BSL-1.0",
        "ZPL": "ZPL ZPL-2.0 ZPL-2.1",
        "PostgreSQL": "PostgreSQL",
        "NCSA": "NCSA",
        "Unicode": "Unicode-3.0 Unicode-DFS-2016",
        "Blue Oak": "BlueOak-1.0.0",
        "CC-BY": "CC-BY CC-BY-3.0 CC-BY-4.0",
        "public domain": "LicenseRef-Public-Domain Unlicense CC0-1.0 WTFPL",
    },
    Category.WEAK: {
        "LGPL": "LGPL LGPL-2.0 LGPL-2.1 LGPL-3.0",
        "MPL": "MPL MPL-1.1 MPL-2.0",
        "EPL": "EPL EPL-1.0 EPL-2.0",
        "CDDL": "CDDL CDDL-1.0 CDDL-1.1",
        "EUPL": "EUPL EUPL-1.1 EUPL-1.2",
        "Artistic": "Artistic Artistic-1.0 Artistic-2.0",
        "OFL": "OFL-1.1",
    },
    Category.STRONG: {
        "GPL": "GPL GPL-1.0 GPL-2.0 GPL-3.0",
        "AGPL": "AGPL AGPL-1.0 AGPL-3.0",
        "OSL": "OSL OSL-3.0",
        "CC-BY-SA": "CC-BY-SA CC-BY-SA-3.0 CC-BY-SA-4.0",
    },
}
_KNOWN = {
    identifier.lower(): Licence(identifier, family, category)
    for category, families in _FAMILIES.items()
    for family, identifiers in families.items()
    for identifier in identifiers.split()
}
# With these, what links to the code keeps its own licence: the GPL then reaches no further than the LGPL.
_LINKING_EXCEPTIONS = (
    "bootloader",
    "classpath",
    "gcc",
    "gnu-javamail",
    "gpl-cc",
    "linking",
    "openjdk",
    "universal-foss",
)


def known(identifier: str) -> Licence | None:
    """Return the licence of an SPDX identifier, `-only`, `-or-later` and `+` allowed; None when it is not known."""
    return _KNOWN.get(re.sub(r"(-only|-or-later|\+)$", "", identifier.lower()))


def category_of(identifier: str) -> Category:
    """Return the category of an SPDX identifier."""
    licence = known(identifier)
    return Category.UNKNOWN if licence is None else licence.category


def _strictest(licences: Iterable[Licence]) -> Category:
    return max((licence.category for licence in licences), key=_RANK.__getitem__, default=Category.UNKNOWN)


def _mildest(licences: Iterable[Licence]) -> Category:
    return min((licence.category for licence in licences), key=_RANK.__getitem__, default=Category.UNKNOWN)


def _all_of(licences: Iterable[Licence]) -> Statement | None:
    """Return the statement that all of these apply, None when there are none."""
    unique = tuple(dict.fromkeys(licences))
    return Statement(unique, _strictest(unique)) if unique else None


# --- SPDX expressions -------------------------------------------------------------------------------------------------

_TOKENS_MAX = 200
"""Longer ones are nobody's licence; and each parenthesis costs a level of the stack."""


def of_expression(text: str) -> Statement | None:
    """Return what an SPDX expression says: OR leaves the choice, AND does not; None when it is not an expression.

    An identifier that is not known is a licence of unknown category.
    """
    tokens = re.findall(r"[()]|[^\s()]+", text)
    if len(tokens) > _TOKENS_MAX:
        return None
    try:
        statement = _either(tokens)
    except IndexError:
        return None
    return None if tokens else statement


def _either(tokens: list[str]) -> Statement:
    parts = [_both(tokens)]
    while tokens and tokens[0].upper() == "OR":
        tokens.pop(0)
        parts.append(_both(tokens))
    return Statement(_licences_of(parts), min((part.category for part in parts), key=_RANK.__getitem__))


def _both(tokens: list[str]) -> Statement:
    parts = [_one(tokens)]
    while tokens and tokens[0].upper() == "AND":
        tokens.pop(0)
        parts.append(_one(tokens))
    return Statement(_licences_of(parts), max((part.category for part in parts), key=_RANK.__getitem__))


def _one(tokens: list[str]) -> Statement:
    word = tokens.pop(0)
    if word == "(":
        inner = _either(tokens)
        if tokens.pop(0) != ")":
            raise IndexError
        return inner
    if word == ")" or word.upper() in {"AND", "OR", "WITH"}:
        raise IndexError
    licence = known(word) or Licence(word, word, Category.UNKNOWN)
    category = licence.category
    if tokens and tokens[0].upper() == "WITH":
        tokens.pop(0)
        exception = tokens.pop(0).lower()
        if category is Category.STRONG and exception.startswith(_LINKING_EXCEPTIONS):
            category = Category.WEAK
    return Statement((licence,), category)


def _licences_of(parts: Sequence[Statement]) -> tuple[Licence, ...]:
    return tuple(dict.fromkeys(licence for part in parts for licence in part.licences))


# --- names in people's words ------------------------------------------------------------------------------------------

# In this order, each blanking what it matched: "Lesser General Public License" must not be read as the GPL again.
_NAMES = [
    (r"gpl[- ]compatible", None),
    (r"\bagpl|affero( general public licen[cs]e)?", "AGPL"),
    (r"\blgpl|(lesser|library)( or (lesser|library))?( general)? public", "LGPL"),
    (r"\bgpl|general public licen[cs]e", "GPL"),
    (r"\bmpl\b|mozilla public", "MPL"),
    (r"\bcc0\b|creative commons zero", "CC0-1.0"),
    (r"\bcc[- ]by[- ]sa\b", "CC-BY-SA"),
    (r"\bcc[- ]by\b(?!-n)", "CC-BY"),
    (r"\bapache\b", "Apache"),
    (r"\b0bsd\b|zero[- ]clause bsd", "0BSD"),
    (r"\bbsd\b", "BSD"),
    (r"\bmit\b|\bexpat\b", "MIT"),
    (r"\biscl?\b", "ISC"),
    (r"\bpsf|python software foundation", "PSF"),
    (r"\bhpnd\b|historical permission notice", "HPND"),
    (r"\bzpl\b|zope public", "ZPL"),
    (r"\bzlib\b", "Zlib"),
    (r"\bboost software\b|\bbsl-1", "BSL-1.0"),
    (r"\bunlicense\b", "Unlicense"),
    (r"\bpublic[- ]domain\b", "LicenseRef-Public-Domain"),
    (r"\bepl\b|eclipse public", "EPL"),
    (r"\bcddl\b|common development and distribution", "CDDL"),
    (r"\beupl\b|european union public", "EUPL"),
    (r"\bartistic\b", "Artistic"),
    (r"\bosl\b|open software licen[cs]e", "OSL"),
]
_NOT_FREE = re.compile(r"proprietary|commercial|all rights reserved|\bsspl|\bbusl|business source", re.IGNORECASE)
_CHOICE = re.compile(r"\bor\b(?!\s+(\(at your option\)\s+)?(any\s+)?(later|newer|lesser|library))|/|\beither\b")


def of_words(text: str) -> Statement | None:
    """Return what a licence's name in people's words says ("New BSD", "LGPL with exceptions"); None when nothing."""
    rest = text.lower()
    found: list[Licence] = []
    for pattern, identifier in _NAMES:
        rest, count = re.subn(pattern, " ", rest)
        if count and identifier is not None:
            found.append(_KNOWN[identifier.lower()])
    if _NOT_FREE.search(rest):
        found.append(Licence(text.strip(), text.strip(), Category.UNKNOWN))
    if not found:
        return None
    return Statement(tuple(found), _mildest(found) if _CHOICE.search(text.lower()) else _strictest(found))


def of_free_text(text: str) -> Statement | None:
    """Return what the `License` field says: an SPDX expression if all of it is known, else a name in words."""
    statement = of_expression(text)
    if statement is not None and all(known(licence.id) for licence in statement.licences):
        return statement
    return of_words(text)


def of_classifiers(classifiers: Iterable[str]) -> Statement | None:
    """Return what the classifiers say together; whether several are a choice they cannot say, so all apply."""
    named = [of_words(each.rpartition("::")[2]) for each in classifiers if each.startswith("License ::")]
    return _all_of(licence for statement in named if statement for licence in statement.licences)


# --- licence texts ----------------------------------------------------------------------------------------------------

_MIT = "permission is hereby granted, free of charge, to any person obtaining a copy"
_BSD = "redistribution and use in source and binary forms"
_ISC = r"permission to use, copy, modify, and(/or)? distribute this software for any purpose with or without fee"

# (licence, what its text has, what its text does not have), on texts as `_flat` gives them. Of the GNU licences the
# titles and grants, not the mere names: each of them, and the MPL, talks about the others.
_TEXTS = [
    ("MIT", (_MIT, "this permission notice shall be included"), ()),
    ("MIT-0", (_MIT,), ("this permission notice",)),
    ("BSD-4-Clause", (_BSD, "all advertising materials mentioning"), ()),
    ("BSD-3-Clause", (_BSD, "endorse or promote products"), ("all advertising materials mentioning",)),
    ("BSD-2-Clause", (_BSD,), ("endorse or promote products",)),
    ("Apache-2.0", (r"apache license,? version 2\.0,? january 2004|under the apache license, version 2\.0",), ()),
    ("ISC", (f"{_ISC} is hereby granted, provided that",), ()),
    ("0BSD", (rf"{_ISC} is hereby granted\.",), ()),
    ("PSF-2.0", ("python software foundation license version 2",), ()),
    ("HPND", ("permission to use, copy, modify,? and distribute this software and its documentation",), ()),
    ("Zlib", ("altered source versions must be plainly marked",), ()),
    ("BSL-1.0", ("boost software license,? version 1",), ()),
    ("ZPL", (r"zope public license \(zpl\) version",), ()),
    ("Unlicense", ("free and unencumbered software released into the public domain",), ()),
    ("CC0-1.0", (r"cc0 1\.0 universal",), ()),
    ("MPL-2.0", (r"mozilla public license,? (version 2\.0 1\. definitions|v\. 2\.0)",), ()),
    ("EPL", (r"eclipse public license,? (version|v\.?) \d",), ()),
    (
        "LGPL",
        ("gnu (lesser|library) general public license version [23]|under the terms of the gnu (lesser|library)",),
        (),
    ),
    ("GPL", ("gnu general public license version [123],|under the terms of the gnu general public license",), ()),
    ("AGPL", ("gnu affero general public license version 3,|under the terms of the gnu affero",), ()),
]
_DECORATION = re.compile(r"[\s*#>|_=-]+")
_QUOTES = re.compile("[\"'`\u2018\u2019\u201c\u201d]")


def of_text(text: str) -> list[str]:
    """Return the identifiers of the licences whose text or grant stands in a licence file."""
    flat = _QUOTES.sub("", _DECORATION.sub(" ", text.lower()))
    return [
        identifier
        for identifier, needed, excluded in _TEXTS
        if all(re.search(pattern, flat) for pattern in needed) and not any(re.search(p, flat) for p in excluded)
    ]


# --- the judgement ----------------------------------------------------------------------------------------------------


def classify(evidence: Evidence) -> Finding:
    """Return the judgement on what a distribution says of its licence."""
    own = [file for file in evidence.files if not file.bundled]
    places = [
        ("License-Expression", evidence.expression, of_expression(evidence.expression or "")),
        ("License", evidence.free_text, of_free_text(evidence.free_text or "")),
        ("classifiers", "; ".join(evidence.classifiers), of_classifiers(evidence.classifiers)),
        ("licence files", _files_shown(own), _all_of(_KNOWN[each.lower()] for file in own for each in file.licences)),
    ]
    said = [(place, statement) for place, _, statement in places if statement is not None]
    lines = [f"{place}: {text}" for place, text, _ in places if text]
    bundled = sorted({each for file in evidence.files if file.bundled for each in file.licences})
    if not said:
        nothing = lines or ["no licence in the metadata, no licence file"]
        return Finding(evidence.package, evidence.version, Category.UNKNOWN, "not known", nothing, bundled=bundled)
    leading_place, leading = said[0]
    against = [
        contradiction
        for place, statement in said[1:]
        if (contradiction := _contradiction(leading_place, leading, place, statement))
    ]
    return Finding(
        evidence.package,
        evidence.version,
        Category.CONTRADICTORY if against else leading.category,
        evidence.expression or str(leading),
        lines,
        against,
        bundled,
    )


def _contradiction(leading_place: str, leading: Statement, place: str, statement: Statement) -> str | None:
    if not leading.families & statement.families:
        return f"{leading_place} says {leading}, {place} say{_s(place)} {statement}"
    stricter = [
        licence.id
        for licence in statement.licences
        if licence.family not in leading.families and _RANK[licence.category] > _RANK[leading.category]
    ]
    return f"{leading_place} says {leading}, {place} add{_s(place)} {', '.join(stricter)}" if stricter else None


def _s(place: str) -> str:
    return "" if place.endswith("s") else "s"


def _files_shown(files: Iterable[LicenceFile]) -> str:
    return "; ".join(f"{file.path} ({', '.join(file.licences) or 'not recognised'})" for file in files)
