"""When a schedule's ticks come, in any time zone, and which of those that were missed start a run."""

from __future__ import annotations

import datetime as dt
import itertools
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import InvalidInput, InvalidSchedule
from keepstep.store import ticks

HOUR, DAY = 3600.0, 86400.0


def at(text):
    """Return an instant that is written in ISO 8601, of UTC when it names no offset."""
    moment = dt.datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp()


def following(cron, timezone, begin, count):
    """Return the next ticks after an instant, as the clocks of the time zone show them."""
    found, tick = [], at(begin)
    for _ in range(count):
        tick = ticks.after(cron, timezone, tick)
        found.append(dt.datetime.fromtimestamp(tick, ZoneInfo(timezone)).isoformat(timespec="minutes"))
    return found


@pytest.mark.parametrize(
    ("cron", "begin", "expected"),
    [
        ("30 2 * * mon-fri", "2027-01-01T02:30", ["2027-01-04T02:30", "2027-01-05T02:30"]),
        ("0 0 31 * *", "2027-01-31T00:00", ["2027-03-31T00:00", "2027-05-31T00:00"]),
        ("0 12 29 2 *", "2027-01-01T00:00", ["2028-02-29T12:00", "2032-02-29T12:00"]),
        ("0 0 L * *", "2028-02-01T00:00", ["2028-02-29T00:00", "2028-03-31T00:00"]),
        ("0 9 * jan,JUL *", "2027-07-31T09:00", ["2028-01-01T09:00", "2028-01-02T09:00"]),
        ("0 0 13 * fri", "2027-08-06T00:00", ["2027-08-13T00:00", "2027-08-20T00:00"]),
        ("*/20 22 * * 7", "2027-01-01T00:00", ["2027-01-03T22:00", "2027-01-03T22:20"]),
        ("@hourly", "2027-01-01T00:00:59", ["2027-01-01T01:00", "2027-01-01T02:00"]),
        ("@daily", "2026-12-31T23:59:59.999", ["2027-01-01T00:00", "2027-01-02T00:00"]),
        ("@weekly", "2027-01-01T00:00", ["2027-01-03T00:00", "2027-01-10T00:00"]),
        ("@monthly", "2027-01-01T00:00", ["2027-02-01T00:00", "2027-03-01T00:00"]),
        ("@yearly", "2027-01-01T00:00", ["2028-01-01T00:00", "2029-01-01T00:00"]),
    ],
)
def test_ticks_come_when_the_expression_says(cron, begin, expected):
    assert following(cron, "UTC", begin, 2) == [f"{each}+00:00" for each in expected]


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        # 02:30 is left out: at the moment at which the clocks are set forward, and only that day.
        ("30 2 * * *", ["2027-03-27T02:30+01:00", "2027-03-28T03:00+02:00", "2027-03-29T02:30+02:00"]),
        # However many times are left out, that moment comes once; one that is said as well is not doubled.
        ("0,15,45 2,3 28 3 *", ["2027-03-28T03:00+02:00", "2027-03-28T03:15+02:00", "2027-03-28T03:45+02:00"]),
        # Of every hour or minute, none is made up for.
        ("30 * 28 3 *", ["2027-03-28T00:30+01:00", "2027-03-28T01:30+01:00", "2027-03-28T03:30+02:00"]),
        ("*/30 2 28-29 3 *", ["2027-03-29T02:00+02:00", "2027-03-29T02:30+02:00", "2028-03-28T02:00+02:00"]),
    ],
)
def test_clocks_that_are_set_forward(cron, expected):
    assert following(cron, "Europe/Berlin", "2027-03-27T00:30+01:00", 3) == expected


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        # 02:30 is shown twice: the first time.
        ("30 2 * * *", ["2027-10-30T02:30+02:00", "2027-10-31T02:30+02:00", "2027-11-01T02:30+01:00"]),
        # Of every hour or minute, both times.
        ("30 * 31 10 *", ["2027-10-31T00:30+02:00", "2027-10-31T01:30+02:00", "2027-10-31T02:30+02:00",
                          "2027-10-31T02:30+01:00", "2027-10-31T03:30+01:00"]),
        ("*/30 2 31 10 *", ["2027-10-31T02:00+02:00", "2027-10-31T02:30+02:00", "2027-10-31T02:00+01:00",
                            "2027-10-31T02:30+01:00"]),
    ],
)  # fmt: skip
def test_clocks_that_are_set_back(cron, expected):
    assert following(cron, "Europe/Berlin", "2027-10-30T01:00+02:00", len(expected)) == expected


def test_in_the_second_of_two_equal_hours_the_tick_of_the_first_is_over():
    assert following("45 2 * * *", "Europe/Berlin", "2027-10-31T02:30+01:00", 1) == ["2027-11-01T02:45+01:00"]


ZONES = ("UTC", "Europe/Berlin", "America/New_York", "America/Havana", "Antarctica/Troll", "Pacific/Apia")
FIELDS = st.sampled_from(["*", "*/7", "0", "30", "5,45", "10-20"])
HOURS = st.sampled_from(["*", "*/5", "0", "1,2", "2", "23"])


@given(
    cron=st.builds("{} {} * * {}".format, FIELDS, HOURS, st.sampled_from(["*", "sun", "mon-fri"])),
    timezone=st.sampled_from(ZONES),
    begin=st.integers(int(at("2011-12-01T00:00")), int(at("2012-12-01T00:00"))),
    later=st.integers(0, int(5 * DAY)),
)
def test_the_next_tick_is_the_same_from_wherever_one_looks(cron, timezone, begin, later):
    line = list(itertools.takewhile(lambda tick: tick <= begin + later, ticks._later(cron, timezone, begin)))
    assert line == sorted(set(line))
    assert all(tick % 60 == 0 for tick in line)
    found = ticks.after(cron, timezone, begin + later)
    assert found > begin + later
    assert ticks.after(cron, timezone, begin) == (line[0] if line else found)
    for before, tick in itertools.pairwise([begin, *line, found]):
        assert ticks.after(cron, timezone, (before + tick) // 2) == tick


# --- missed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("skip", (None, "2027-01-08T13:00", "2027-01-08T12:00")),
        ("last", ("2027-01-08T12:00", "2027-01-08T13:00", "2027-01-08T11:00")),
        # 169 are due: the last 100 of them start a run.
        ("all", ("2027-01-04T09:00", "2027-01-04T10:00", "2027-01-04T08:00")),
    ],
)
def test_after_a_week_the_policy_says_what_is_made_up_for(missed, expected):
    found = ticks.due("@hourly", "UTC", missed, first=at("2027-01-01T12:00"), now=at("2027-01-08T12:34"))
    assert found == tuple(None if each is None else at(each) for each in expected)


def test_all_are_made_up_for_one_after_the_other_up_to_their_bound():
    first, now = at("2027-01-01T00:00"), at("2027-01-05T04:30")
    found, skipped = [], []
    while first is not None and first <= now:
        due = ticks.due("@hourly", "UTC", "all", first=first, now=now)
        found.append(due.tick)
        skipped.append(due.skipped)
        first = due.then
    assert found == [at("2027-01-01T01:00") + HOUR * number for number in range(100)]
    assert skipped == [at("2027-01-01T00:00"), *[None] * 99]
    assert first == at("2027-01-05T05:00")


@pytest.mark.parametrize(("late_seconds", "fires"), [(0, True), (59.9, True), (60, False), (1000, False)])
def test_a_tick_is_missed_when_nobody_has_come_to_it_for_a_minute(late_seconds, fires):
    first = at("2027-01-01T00:00")
    found = ticks.due("@daily", "UTC", "skip", first=first, now=first + late_seconds)
    assert found == ((first, first + DAY, None) if fires else (None, first + DAY, first))


def test_with_skip_the_tick_that_is_on_time_fires_though_others_were_missed():
    first = at("2027-01-01T00:00")
    found = ticks.due("* * * * *", "UTC", "skip", first=first, now=first + 605)
    assert found == (first + 600, first + 660, first + 540)


def test_one_tick_that_is_due_is_the_same_for_every_policy():
    first = at("2027-02-28T23:59")
    for missed in ticks.MISSED:
        assert ticks.due("59 23 L * *", "UTC", missed, first=first, now=first + 1) == (
            first,
            at("2027-03-31T23:59"),
            None,
        )


def test_a_year_of_minutes_is_not_counted_through():
    first = at("2026-01-01T00:00")
    for missed, tick in (("last", DAY * 365), ("all", DAY * 365 - 99 * 60)):
        found = ticks.due("* * * * *", "Europe/Berlin", missed, first=first, now=first + DAY * 365)
        assert found == (first + tick, first + tick + 60, first + tick - 60)


def test_a_tick_of_other_rules_of_the_time_zone_is_still_one():
    first = at("2027-01-01T00:07")
    assert ticks.due("@hourly", "UTC", "last", first=first, now=first + 60) == (first, at("2027-01-01T01:00"), None)


# --- refused ----------------------------------------------------------------------------------------------------------

_FIELDS = (
    "five fields are needed, minute hour day-of-month month day-of-week, as in '30 8 * * mon-fri', "
    "or one of @hourly, @daily, @weekly, @monthly, @yearly"
)

_NEVER = " never comes: no day in 50 years fits both its days and its months"


@pytest.mark.parametrize(
    ("cron", "problem"),
    [
        ("", "$.cron: '' has 0 fields; " + _FIELDS),
        ("* * * *", "$.cron: '* * * *' has 4 fields; " + _FIELDS),
        ("0 * * * * *", "$.cron: '0 * * * * *' has 6 fields; " + _FIELDS),
        ("@reboot", "$.cron: '@reboot' has 1 field; " + _FIELDS),
        ("60 * * * *", "$.cron: '60' is no minute; " + _FIELDS),
        ("* 24 * * *", "$.cron: '24' is no hour; " + _FIELDS),
        ("* * 0 * *", "$.cron: '0' is no day-of-month; " + _FIELDS),
        ("* * * foo *", "$.cron: 'foo' is no month; " + _FIELDS),
        ("* * * * fri-mon", "$.cron: 'fri-mon' is no day-of-week; " + _FIELDS),
        ("*/0 * * * *", "$.cron: '*/0' is no minute; " + _FIELDS),
        ("1,,2 * * * *", "$.cron: '1,,2' is no minute; " + _FIELDS),
        ("* " * 101, "$.cron: it has more than 200 characters; " + _FIELDS),
        ("0 0 30 2 *", "$.cron: '0 0 30 2 *'" + _NEVER),
        ("0 0 31 4,jun *", "$.cron: '0 0 31 4,jun *'" + _NEVER),
        ("0 0 */20 * 1L", "$.cron: '0 0 */20 * 1L'" + _NEVER),
    ],
)  # fmt: skip
def test_an_expression_that_cannot_be_used_is_refused_by_its_field(cron, problem):
    with pytest.raises(InvalidSchedule) as caught:
        ticks.check(cron, "UTC", at("2027-01-01T00:00"))
    assert caught.value.message == problem
    assert isinstance(caught.value, InvalidInput)


@pytest.mark.parametrize(
    "timezone", ["", "Mars/Olympus", "localtime", "Europe", "../etc/passwd", "/etc/passwd", "a\0b"]
)
def test_a_time_zone_that_is_none_is_refused(timezone):
    with pytest.raises(InvalidSchedule) as caught:
        ticks.check("@daily", timezone, at("2027-01-01T00:00"))
    assert caught.value.message == (
        f"$.timezone: {timezone!r} is no time zone: use a name of IANA's, as in 'Europe/Berlin' or 'UTC'"
    )


@given(st.text(alphabet="0123456789*/,-#LWabdefghijmnoprstuvwy @²", max_size=30), st.sampled_from(ZONES))
def test_any_text_is_taken_or_refused(cron, timezone):
    now = at("2027-01-01T00:00")
    try:
        ticks.check(cron, timezone, now)
    except InvalidSchedule:
        return
    assert ticks.after(cron, timezone, now) > now


def test_the_name_of_a_thread_holds_its_tick():
    tick = at("2027-03-28T03:00+02:00")
    assert ticks.thread_name("report-{tick}", tick) == "report-2027-03-28T01:00Z"
    assert ticks.thread_name("report", tick) == "report"
