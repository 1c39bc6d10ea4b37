"""Options as they are typed: times and lists of numbers, refused by the option's name and with the fault."""

from __future__ import annotations

import math

from tuner.inputs import InputError, parse_duration_s


def duration_s(option: str, text: str) -> float:
    """A time above zero. Unit: seconds.

    Raises:
        InputError: naming the option, what is wrong with its value, and what would do.
    """
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None
    if seconds <= 0:
        raise InputError(f"{option}: {text!r} must be above 0, such as 500ms or 30s")
    return seconds


def limit_ms(option: str, text: str | None) -> float | None:
    """A limit on a latency, where one was given. Unit: milliseconds."""
    return None if text is None else 1000 * duration_s(option, text)


def loads_in(option: str, text: str | None) -> tuple[int, ...]:
    """Whole numbers of at least 1, separated by commas; none where the option was left out.

    Raises:
        InputError: naming the option, what is wrong with its value, and what would do.
    """
    numbers = _numbers(option, text, such_as="1,4,16")
    for number in numbers:
        if number != int(number) or number < 1:
            raise InputError(
                f"{option}: {number:g} is no number of users: write whole numbers from 1 on, such as 1,4,16"
            )
    return tuple(int(number) for number in numbers)


def rates_in(option: str, text: str | None) -> tuple[float, ...]:
    """Requests per second, separated by commas; none where the option was left out.

    Raises:
        InputError: naming the option, what is wrong with its value, and what would do.
    """
    numbers = _numbers(option, text, such_as="1,2,4.5")
    for number in numbers:
        if number <= 0:
            raise InputError(f"{option}: {number:g} is no rate: requests per second must be above 0, such as 1,2,4.5")
    return numbers


def _numbers(option: str, text: str | None, *, such_as: str) -> tuple[float, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError(f"{option}: {text!r} holds no number: write {such_as}")
    return tuple(_number(option, part, such_as=such_as) for part in parts)


def _number(option: str, text: str, *, such_as: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise InputError(f"{option}: {text!r} is not a number: write {such_as}") from None
    if not math.isfinite(number):
        raise InputError(f"{option}: {text!r} is not a finite number: write {such_as}")
    return number
