"""Travel: flights, hotels, cars and bookings."""

from __future__ import annotations

from ludus.worlds.functions.domains.catalogue import Function, Gift, Param
from ludus.worlds.functions.domains.kinds import CITIES, DATES, TIMES
from ludus.worlds.functions.domains.state import DomainState, Row


def search_flights(state: DomainState, origin: str, destination: str, date: str) -> Row:
    """Find the cheapest flight."""
    flight_id = state.issue("flight", origin, destination, date)
    state.need("flight", flight_id).update(city=destination, date=date)
    return {"flight_id": flight_id, "price": state.number(60, 300, flight_id)}


def book_flight(state: DomainState, flight_id: str, passenger: str) -> Row:
    """Book a seat on a flight."""
    flight = state.need("flight", flight_id)
    booking_id = state.issue("booking", flight_id, passenger)
    state.need("booking", booking_id).update(flight)
    return {"booking_id": booking_id}


def get_flight_status(state: DomainState, flight_id: str) -> Row:
    """Time and gate of a flight."""
    state.need("flight", flight_id)
    return {"time": state.pick(TIMES, flight_id), "gate": state.number(1, 60, flight_id)}


def search_hotels(state: DomainState, city: str, date: str, stars: int) -> Row:
    """Find a hotel."""
    hotel_id = state.issue("hotel", city, date, stars)
    state.need("hotel", hotel_id).update(city=city, date=date)
    return {"hotel_id": hotel_id, "price": state.number(40, 200, hotel_id)}


def book_hotel(state: DomainState, hotel_id: str, guest: str, nights: int) -> Row:
    """Book a hotel."""
    hotel = state.need("hotel", hotel_id)
    booking_id = state.issue("booking", hotel_id, guest, nights)
    state.need("booking", booking_id).update(hotel)
    return {"booking_id": booking_id}


def rent_car(state: DomainState, city: str, days: int, driver: str) -> Row:
    """Rent a car."""
    booking_id = state.issue("booking", "car", city, days, driver)
    state.need("booking", booking_id).update(city=city)
    return {"booking_id": booking_id}


def get_booking(state: DomainState, booking_id: str) -> Row:
    """Place and date of a booking."""
    row = state.need("booking", booking_id)
    city = row.setdefault("city", state.pick(CITIES, booking_id))
    return {"city": city, "date": row.setdefault("date", state.pick(DATES, booking_id))}


def cancel_booking(state: DomainState, booking_id: str) -> Row:
    """Cancel a booking."""
    state.drop("booking", booking_id)
    return {"refund": state.number(20, 120, booking_id)}


_FLIGHT = Param("flight_id", "flight")
_BOOKING = Param("booking_id", "booking")
_BOOKED = (Gift("booking_id", "booking"),)

FUNCTIONS = (
    Function(
        "search_flights",
        "travel",
        ("find a flight", "search for a flight"),
        (Param("origin", "city", "from {}"), Param("destination", "city", "to {}"), Param("date", "date", "on {}")),
        search_flights,
        (Gift("flight_id", "flight"), Gift("price", "amount")),
    ),
    Function(
        "book_flight",
        "travel",
        ("book", "reserve a seat on"),
        (_FLIGHT, Param("passenger", "person", "for {}")),
        book_flight,
        _BOOKED,
    ),
    Function(
        "get_flight_status",
        "travel",
        ("check", "get the status of"),
        (_FLIGHT,),
        get_flight_status,
        (Gift("time", "time"),),
    ),
    Function(
        "search_hotels",
        "travel",
        ("find a hotel", "search for a hotel"),
        (
            Param("city", "city", "in {}"),
            Param("date", "date", "from {}"),
            Param("stars", "count", "of at least {} stars", 3),
        ),
        search_hotels,
        (Gift("hotel_id", "hotel"), Gift("price", "amount")),
    ),
    Function(
        "book_hotel",
        "travel",
        ("book", "reserve"),
        (Param("hotel_id", "hotel"), Param("guest", "person", "for {}"), Param("nights", "count", "for {} nights")),
        book_hotel,
        _BOOKED,
    ),
    Function(
        "rent_car",
        "travel",
        ("rent a car", "hire a car"),
        (
            Param("city", "city", "in {}"),
            Param("days", "count", "for {} days"),
            Param("driver", "person", "with {} as the driver"),
        ),
        rent_car,
        _BOOKED,
    ),
    Function(
        "get_booking",
        "travel",
        ("look up", "check"),
        (_BOOKING,),
        get_booking,
        (Gift("city", "city"), Gift("date", "date")),
    ),
    Function("cancel_booking", "travel", ("cancel", "annul"), (_BOOKING,), cancel_booking, (Gift("refund", "amount"),)),
)
