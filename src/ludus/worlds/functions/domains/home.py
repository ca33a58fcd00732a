"""Home: devices, heating, lights, doors and timers."""

from __future__ import annotations

from ludus.worlds.functions.domains.catalogue import Function, Gift, Param
from ludus.worlds.functions.domains.state import DomainState, Row


def find_device(state: DomainState, appliance: str, room: str) -> Row:
    """Find a device in a room."""
    return {"device_id": state.issue("device", appliance, room)}


def switch_on(state: DomainState, device_id: str) -> Row:
    """Switch a device on."""
    state.need("device", device_id)["on"] = True
    return {"device_id": device_id, "on": True}


def switch_off(state: DomainState, device_id: str) -> Row:
    """Switch a device off."""
    state.need("device", device_id)["on"] = False
    return {"device_id": device_id, "on": False}


def get_power_use(state: DomainState, device_id: str) -> Row:
    """The power a device uses."""
    return {"watts": state.number(5, 900, device_id) if state.need("device", device_id).get("on", True) else 0}


def set_temperature(state: DomainState, room: str, degrees: float) -> Row:
    """Heat a room."""
    state.row("room", room)["degrees"] = degrees
    return {"room": room, "degrees": degrees}


def get_temperature(state: DomainState, room: str) -> Row:
    """The temperature of a room."""
    row = state.row("room", room)
    return {"degrees": row.setdefault("degrees", state.number(30, 50, "degrees", room) / 2)}


def dim_lights(state: DomainState, room: str, percent: int) -> Row:
    """Dim the lights of a room."""
    state.row("room", room)["lights"] = percent
    return {"room": room, "lights": percent}


def lock_door(state: DomainState, door: str) -> Row:
    """Lock a door."""
    state.row("door", door)["locked"] = True
    return {"door": door, "locked": True}


def set_alarm(state: DomainState, time: str, room: str, daily: bool) -> Row:
    """Set the alarm of a room."""
    state.row("room", room)["alarm"] = time
    return {"room": room, "alarm": time, "daily": daily}


def set_timer(state: DomainState, minutes: int, label: str) -> Row:
    """Start a timer."""
    timer_id = state.issue("timer", minutes, label)
    state.need("timer", timer_id).update(minutes=minutes, label=label)
    return {"timer_id": timer_id}


def cancel_timer(state: DomainState, timer_id: str) -> Row:
    """Cancel a timer."""
    state.drop("timer", timer_id)
    return {"cancelled": timer_id}


_DEVICE = Param("device_id", "device")
_ROOM = Param("room", "room", "in the {}")

FUNCTIONS = (
    Function(
        "find_device",
        "home",
        ("find a device", "look for a device"),
        (Param("appliance", "appliance", "of the kind {}"), _ROOM),
        find_device,
        (Gift("device_id", "device"),),
    ),
    Function("switch_on", "home", ("switch on", "turn on"), (_DEVICE,), switch_on),
    Function("switch_off", "home", ("switch off", "turn off"), (_DEVICE,), switch_off),
    Function("get_power_use", "home", ("get the power use of",), (_DEVICE,), get_power_use),
    Function(
        "set_temperature",
        "home",
        ("set the heating", "heat to a set temperature"),
        (_ROOM, Param("degrees", "degrees", "to {} degrees")),
        set_temperature,
    ),
    Function(
        "get_temperature",
        "home",
        ("check the room temperature",),
        (_ROOM,),
        get_temperature,
        (Gift("degrees", "degrees"),),
    ),
    Function(
        "dim_lights",
        "home",
        ("dim the lights", "set the lights"),
        (_ROOM, Param("percent", "percent", "to {} percent")),
        dim_lights,
    ),
    Function("lock_door", "home", ("lock",), (Param("door", "door", "the {}"),), lock_door),
    Function(
        "set_alarm",
        "home",
        ("set the alarm",),
        (Param("time", "time", "for {}"), _ROOM, Param("daily", "flag", "every day", False)),
        set_alarm,
    ),
    Function(
        "set_timer",
        "home",
        ("start a timer", "set a timer"),
        (Param("minutes", "minutes", "of {} minutes"), Param("label", "label", "called {}")),
        set_timer,
        (Gift("timer_id", "timer"),),
    ),
    Function("cancel_timer", "home", ("cancel", "stop"), (Param("timer_id", "timer"),), cancel_timer),
)
