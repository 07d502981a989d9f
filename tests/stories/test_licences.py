"""The audit's classifier, on what real distributions and real licences say."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from examples.licence_audit import distributions, licences
from examples.licence_audit.licences import Category, Evidence, LicenceFile, classify

PERMISSIVE, WEAK, STRONG, UNKNOWN, CONTRADICTORY = Category
ROOT = Path(__file__).parents[2]

# Openings and grants, word for word, as they stand in COPYING files and in the heads of sources.
GPL_3 = """
                    GNU GENERAL PUBLIC LICENSE
                       Version 3, 29 June 2007

 Copyright (C) 2007 Free Software Foundation, Inc. <https://fsf.org/>
 Everyone is permitted to copy and distribute verbatim copies
 of this license document, but changing it is not allowed.
"""
GPL_3_END = """
  The GNU General Public License does not permit incorporating your program
into proprietary programs.  If your program is a subroutine library, you
may consider it more useful to permit linking proprietary applications with
the library.  If this is what you want to do, use the GNU Lesser General
Public License instead of this License.
"""
LGPL_2_1 = """
                  GNU LESSER GENERAL PUBLIC LICENSE
                       Version 2.1, February 1999

 Copyright (C) 1991, 1999 Free Software Foundation, Inc.

 [This is the first released version of the Lesser GPL.  It also counts
 as the successor of the GNU Library Public License, version 2, hence
 the version number 2.1.]

  3. You may opt to apply the terms of the ordinary GNU General Public
License instead of this License to a given copy of the Library.
"""
AGPL_3_GRANT = """
    This program is free software: you can redistribute it and/or modify
    it under the terms of the GNU Affero General Public License as published
    by the Free Software Foundation, either version 3 of the License, or
    (at your option) any later version.
"""
MPL_2 = """
Mozilla Public License Version 2.0
==================================

1. Definitions
--------------

1.12. "Secondary License"
    means either the GNU General Public License, Version 2.0, the GNU
    Lesser General Public License, Version 2.1, the GNU Affero General
    Public License, Version 3.0, or any later versions of those
    licenses.
"""
MPL_2_NOTICE = """
***** BEGIN LICENSE BLOCK *****
This Source Code Form is subject to the terms of the Mozilla Public License,
v. 2.0. If a copy of the MPL was not distributed with this file, You can obtain
one at http://mozilla.org/MPL/2.0/.
"""
BSD_3 = """
# Redistribution and use in source and binary forms, with or without
# modification, are permitted provided that the following conditions are met:
#
# * Redistributions in binary form must reproduce the above copyright notice,
#   this list of conditions and the following disclaimer in the documentation
# * Neither the name of the copyright holder nor the names of its contributors
#   may be used to endorse or promote products derived from this software
"""
ZERO_BSD = """
Permission to use, copy, modify, and/or distribute this software for any
purpose with or without fee is hereby granted.

THE SOFTWARE IS PROVIDED "AS IS" AND THE AUTHOR DISCLAIMS ALL WARRANTIES
"""
ISC = """
Permission to use, copy, modify, and distribute this software for any
purpose with or without fee is hereby granted, provided that the above
copyright notice and this permission notice appear in all copies.
"""


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GPL_3, ["GPL"]),
        (GPL_3_END, []),
        (LGPL_2_1, ["LGPL"]),
        (AGPL_3_GRANT, ["AGPL"]),
        (MPL_2, ["MPL-2.0"]),
        (MPL_2_NOTICE, ["MPL-2.0"]),
        (BSD_3, ["BSD-3-Clause"]),
        (ZERO_BSD, ["0BSD"]),
        (ISC, ["ISC"]),
        (GPL_3 + GPL_3_END + LGPL_2_1, ["LGPL", "GPL"]),
        ("See the AUTHORS file.", []),
        ("", []),
    ],
    ids=lambda value: value.strip()[:20] if isinstance(value, str) else "",
)
def test_a_text_is_known_by_its_title_or_grant_and_not_by_what_it_mentions(text, expected):
    assert licences.of_text(text) == expected
    assert licences.of_text(textwrap.indent(text, " * ").replace("\n", "\r\n")) == expected


def test_our_own_licence_file_is_recognised():
    assert licences.of_text((ROOT / "LICENSE").read_text()) == ["Apache-2.0"]


@pytest.mark.parametrize(
    ("package", "texts"),
    [
        ("celery", ["BSD-3-Clause"]),
        ("SQLAlchemy", ["MIT"]),
        ("Pygments", ["BSD-2-Clause"]),
        ("tenacity", ["Apache-2.0"]),
        ("shellingham", ["ISC"]),
    ],
)
def test_the_texts_that_installed_packages_ship_are_recognised(package, texts):
    assert [file.licences for file in distributions.evidence_of(package).files if not file.bundled] == [texts]


# --- expressions and names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "category"),
    [
        ("MIT", PERMISSIVE),
        ("Apache-2.0 OR BSD-3-Clause", PERMISSIVE),
        ("MPL-2.0 AND MIT", WEAK),
        ("GPL-3.0-or-later", STRONG),
        ("MIT OR GPL-2.0-only", PERMISSIVE),
        ("MIT AND (GPL-2.0+ OR LGPL-2.1-or-later)", WEAK),
        ("MIT OR Apache-2.0 AND GPL-3.0-only", PERMISSIVE),
        ("(MIT OR Apache-2.0) AND GPL-3.0-only", STRONG),
        ("GPL-2.0-only WITH Classpath-exception-2.0", WEAK),
        ("GPL-2.0-only WITH Autoconf-exception-2.0", STRONG),
        ("Apache-2.0 WITH LLVM-exception", PERMISSIVE),
        ("LicenseRef-Proprietary", UNKNOWN),
        ("MIT AND LicenseRef-Proprietary", UNKNOWN),
        ("MIT OR LicenseRef-Proprietary", PERMISSIVE),
        ("mit or apache-2.0", PERMISSIVE),
    ],
)
def test_or_leaves_the_choice_and_the_strictest_of_and_counts(expression, category):
    assert licences.of_expression(expression).category is category


@pytest.mark.parametrize(
    "text", ["", "MIT License", "(MIT", "MIT)", "MIT OR", "AND", "MIT WITH", "(" * 100_000, "MIT MIT"]
)
def test_what_is_no_expression_is_none(text):
    assert licences.of_expression(text) is None


@pytest.mark.parametrize(
    ("text", "named", "category"),
    [
        ("BSD", "BSD", PERMISSIVE),
        ("New BSD", "BSD", PERMISSIVE),
        ("BSD 2-Clause License", "BSD", PERMISSIVE),
        ("Apache 2.0", "Apache", PERMISSIVE),
        ("The MIT License (MIT)", "MIT", PERMISSIVE),
        ("Apache-2.0", "Apache-2.0", PERMISSIVE),
        ("LGPL with exceptions", "LGPL", WEAK),
        ("GNU Library or Lesser General Public License (LGPL)", "LGPL", WEAK),
        ("GNU General Public License v3 or later (GPLv3+)", "GPL", STRONG),
        ("GNU Affero General Public License v3", "AGPL", STRONG),
        ("GPLv2 or later", "GPL", STRONG),
        ("LGPLv2+, BSD", "LGPL, BSD", WEAK),
        ("MIT / Apache", "Apache, MIT", PERMISSIVE),
        ("GPL or MIT", "GPL, MIT", PERMISSIVE),
        ("BSD, GPL-compatible", "BSD", PERMISSIVE),
        ("Mozilla Public License 2.0 (MPL 2.0)", "MPL", WEAK),
        ("Proprietary", "Proprietary", UNKNOWN),
        ("Free for non-commercial use", "Free for non-commercial use", UNKNOWN),
    ],
)
def test_a_licence_in_peoples_words(text, named, category):
    statement = licences.of_free_text(text)

    assert str(statement) == named
    assert statement.category is category


@pytest.mark.parametrize("text", ["Dual License", "see LICENSE", "limited", "permit"])
def test_words_that_name_no_licence(text):
    assert licences.of_free_text(text) is None


# --- the judgement ----------------------------------------------------------------------------------------------------


def evidence(**told):
    return Evidence("example", "1.0", **told)


def test_places_that_agree():
    finding = classify(
        evidence(
            free_text="BSD",
            classifiers=["License :: OSI Approved :: BSD License"],
            files=[LicenceFile("LICENSE", ["BSD-3-Clause"])],
        )
    )

    assert (finding.category, finding.licence, finding.concern) == (PERMISSIVE, "BSD", None)
    assert finding.evidence == [
        "License: BSD",
        "classifiers: License :: OSI Approved :: BSD License",
        "licence files: LICENSE (BSD-3-Clause)",
    ]


@pytest.mark.parametrize(
    ("told", "contradiction"),
    [
        (
            {"expression": "MIT", "files": [LicenceFile("COPYING", ["GPL"])]},
            "License-Expression says MIT, licence files say GPL",
        ),
        (
            {"free_text": "MIT", "classifiers": ["License :: OSI Approved :: Apache Software License"]},
            "License says MIT, classifiers say Apache",
        ),
        (
            {"expression": "MIT", "files": [LicenceFile("LICENSE", ["MIT", "LGPL"])]},
            "License-Expression says MIT, licence files add LGPL",
        ),
    ],
)
def test_places_that_contradict_each_other(told, contradiction):
    finding = classify(evidence(**told))

    assert finding.category is CONTRADICTORY
    assert finding.contradictions == [contradiction]
    assert finding.concern == f"contradictory: {contradiction}"


def test_a_further_licence_that_asks_for_no_more_is_no_contradiction():
    told = {"expression": "PSF-2.0", "files": [LicenceFile("LICENSE", ["PSF-2.0", "HPND", "0BSD"])]}

    assert classify(evidence(**told)).category is PERMISSIVE


def test_classifiers_cannot_say_that_they_are_a_choice_so_the_strictest_counts():
    classifiers = ["License :: OSI Approved", "License :: OSI Approved :: MIT License"]
    strict = [*classifiers, "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"]

    assert classify(evidence(classifiers=classifiers)).category is PERMISSIVE
    assert classify(evidence(classifiers=strict)).category is STRONG


def test_a_text_alone_will_do():
    finding = classify(evidence(files=[LicenceFile("LICENSE", ["MPL-2.0"])]))

    assert (finding.category, finding.licence) == (WEAK, "MPL-2.0")
    assert finding.concern == "weak copyleft: MPL-2.0"


def test_who_says_nothing_is_unknown():
    silent = classify(evidence())
    vague = classify(evidence(free_text="Dual License", files=[LicenceFile("LICENSE", [])]))

    assert (silent.category, silent.evidence) == (UNKNOWN, ["no licence in the metadata, no licence file"])
    assert (vague.category, vague.evidence) == (
        UNKNOWN,
        ["License: Dual License", "licence files: LICENSE (not recognised)"],
    )


def test_bundled_code_is_a_concern_of_its_own_and_does_not_change_the_category():
    files = [LicenceFile("LICENSE", ["MIT"]), LicenceFile("vendor/LICENSE", ["MPL-2.0", "ISC"], bundled=True)]
    finding = classify(evidence(expression="MIT", files=files))

    assert (finding.category, finding.bundled) == (PERMISSIVE, ["ISC", "MPL-2.0"])
    assert finding.concern == "bundles weak copyleft: MPL-2.0"


# --- distributions ----------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a distribution of given metadata and licence files."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name, metadata="", **files):
        info = tmp_path / f"{name}-1.0.dist-info"
        for path, text in files.items():
            (info / path).parent.mkdir(parents=True, exist_ok=True)
            (info / path).write_text(text)
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{metadata}\n")
        listed = [f"{info.name}/{path},," for path in ("METADATA", "RECORD", *files)]
        (info / "RECORD").write_text("\n".join(listed) + "\n")

    return install


def test_a_distribution_is_read_with_its_own_files_and_those_that_it_bundles(installed):
    files = {"licenses/LICENSE": LGPL_2_1, "licenses/vendor/x/COPYING": GPL_3, "licenses/NOTICE": GPL_3}
    installed("made_up", "License: LGPLv2+\nClassifier: License :: DFSG approved\nClassifier: Typing :: Typed", **files)

    assert distributions.evidence_of("made-up") == Evidence(
        "made-up",
        "1.0",
        None,
        "LGPLv2+",
        ["License :: DFSG approved"],
        [LicenceFile("LICENSE", ["LGPL"]), LicenceFile("vendor/x/COPYING", ["GPL"], bundled=True)],
    )


def test_a_licence_text_in_the_license_field_is_read_as_a_text(installed):
    installed("wordy", "License: " + BSD_3.strip().replace("\n", "\n        "))

    found = distributions.evidence_of("wordy")

    assert found.free_text is None
    assert found.files == [LicenceFile("the License field", ["BSD-3-Clause"])]


def test_unknown_in_the_license_field_says_nothing(installed):
    installed("silent", "License: UNKNOWN")

    assert distributions.evidence_of("silent") == Evidence("silent", "1.0")


def test_a_distribution_that_is_gone_says_nothing():
    assert distributions.evidence_of("never-was-here") == Evidence("never-was-here", "not installed")


def test_every_distribution_is_listed_once():
    names = distributions.installed()

    assert {"celery", "keepstep", "psycopg2-binary"} <= set(names)
    assert len(names) == len(set(names))


def test_the_lgpl_dependency_of_this_project_is_found():
    finding = classify(distributions.evidence_of("psycopg2-binary"))

    assert (finding.category, finding.concern) == (WEAK, "weak copyleft: LGPL")
