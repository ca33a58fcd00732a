"""Weather: the sky, forecasts and alerts."""

from __future__ import annotations

from ludus.worlds.functions.domains.catalogue import Function, Gift, Param
from ludus.worlds.functions.domains.kinds import DATES, TIMES
from ludus.worlds.functions.domains.state import DomainState, Row

_SKIES = ("clear", "cloudy", "rain", "snow", "fog")


def _degrees(state: DomainState, unit: str, *parts: str) -> float:
    celsius = state.number(-10, 70, "degrees", *parts) / 2
    return celsius * 9 / 5 + 32 if unit.lower() == "fahrenheit" else celsius


def get_weather(state: DomainState, city: str, unit: str) -> Row:
    """The weather now."""
    return {"degrees": _degrees(state, unit, city), "sky": state.pick(_SKIES, city)}


def get_forecast(state: DomainState, city: str, date: str) -> Row:
    """The weather of a day."""
    return {"degrees": _degrees(state, "celsius", city, date), "sky": state.pick(_SKIES, city, date)}


def get_wind(state: DomainState, city: str) -> Row:
    """The speed of the wind."""
    return {"speed": state.number(0, 90, "wind", city)}


def get_sunrise(state: DomainState, city: str, date: str) -> Row:
    """When the sun rises."""
    return {"time": state.pick(TIMES[:8], "sunrise", city, date)}


def get_air_quality(state: DomainState, city: str) -> Row:
    """The quality of the air."""
    return {"index": state.number(1, 150, "air", city)}


def find_warmest_day(state: DomainState, city: str) -> Row:
    """The warmest day to come."""
    return {"date": state.pick(DATES, "warmest", city)}


def set_storm_alert(state: DomainState, city: str, phone: str) -> Row:
    """Alert a phone of storms."""
    return {"alert_id": state.issue("alert", city, phone)}


def cancel_alert(state: DomainState, alert_id: str) -> Row:
    """Cancel an alert."""
    state.drop("alert", alert_id)
    return {"cancelled": alert_id}


_CITY = Param("city", "city", "in {}")
_DATE = Param("date", "date", "on {}")
_WARMTH = (Gift("degrees", "degrees"),)

FUNCTIONS = (
    Function(
        "get_weather",
        "weather",
        ("get the weather", "tell me the weather"),
        (_CITY, Param("unit", "unit", "in degrees {}", "celsius")),
        get_weather,
        _WARMTH,
    ),
    Function(
        "get_forecast", "weather", ("get the forecast", "look up the forecast"), (_CITY, _DATE), get_forecast, _WARMTH
    ),
    Function("get_wind", "weather", ("get the wind speed",), (_CITY,), get_wind),
    Function(
        "get_sunrise", "weather", ("find out when the sun rises",), (_CITY, _DATE), get_sunrise, (Gift("time", "time"),)
    ),
    Function("get_air_quality", "weather", ("check the air quality",), (_CITY,), get_air_quality),
    Function(
        "find_warmest_day", "weather", ("find the warmest day",), (_CITY,), find_warmest_day, (Gift("date", "date"),)
    ),
    Function(
        "set_storm_alert",
        "weather",
        ("set a storm alert",),
        (Param("city", "city", "for {}"), Param("phone", "phone", "to the phone {}")),
        set_storm_alert,
        (Gift("alert_id", "alert"),),
    ),
    Function("cancel_alert", "weather", ("cancel", "stop"), (Param("alert_id", "alert"),), cancel_alert),
)
