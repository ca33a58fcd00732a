"""Media: songs, playlists and films."""

from __future__ import annotations

from ludus.worlds.functions.domains.catalogue import Function, Gift, Param
from ludus.worlds.functions.domains.kinds import PEOPLE, TEXTS
from ludus.worlds.functions.domains.state import DomainState, Row


def search_song(state: DomainState, title: str) -> Row:
    """Find a song by title."""
    return {"track_id": state.issue("track", title), "artist": state.pick(PEOPLE, "artist", title)}


def play_track(state: DomainState, track_id: str, room: str) -> Row:
    """Play a track in a room."""
    state.need("track", track_id)
    state.row("room", room)["plays"] = track_id
    return {"room": room, "plays": track_id}


def get_lyrics(state: DomainState, track_id: str) -> Row:
    """The words of a track."""
    state.need("track", track_id)
    return {"text": state.pick(TEXTS, "lyrics", track_id)}


def create_playlist(state: DomainState, label: str) -> Row:
    """Make a playlist."""
    return {"playlist_id": state.issue("playlist", label)}


def add_to_playlist(state: DomainState, track_id: str, playlist_id: str) -> Row:
    """Add a track to a playlist."""
    state.need("track", track_id)
    row = state.need("playlist", playlist_id)
    row["tracks"] = f"{row.get('tracks', '')} {track_id}".strip()
    return {"tracks": row["tracks"]}


def set_volume(state: DomainState, room: str, percent: int) -> Row:
    """Set the volume in a room."""
    state.row("room", room)["volume"] = percent
    return {"room": room, "volume": percent}


def search_film(state: DomainState, genre: str) -> Row:
    """Find a film of a genre."""
    return {"film_id": state.issue("film", genre), "minutes": state.number(80, 160, genre)}


def play_film(state: DomainState, film_id: str, room: str) -> Row:
    """Play a film in a room."""
    state.need("film", film_id)
    state.row("room", room)["plays"] = film_id
    return {"room": room, "plays": film_id}


def rate_film(state: DomainState, film_id: str, stars: int) -> Row:
    """Rate a film."""
    state.need("film", film_id)["stars"] = stars
    return {"film_id": film_id, "stars": stars}


_TRACK = Param("track_id", "track")
_FILM = Param("film_id", "film")
_ROOM = Param("room", "room", "in the {}")

FUNCTIONS = (
    Function(
        "search_song",
        "media",
        ("find the song", "search for the song"),
        (Param("title", "song"),),
        search_song,
        (Gift("track_id", "track"),),
    ),
    Function("play_track", "media", ("play",), (_TRACK, _ROOM), play_track),
    Function("get_lyrics", "media", ("get the lyrics of",), (_TRACK,), get_lyrics, (Gift("text", "text"),)),
    Function(
        "create_playlist",
        "media",
        ("make a playlist", "create a playlist"),
        (Param("label", "label", "called {}"),),
        create_playlist,
        (Gift("playlist_id", "playlist"),),
    ),
    Function(
        "add_to_playlist",
        "media",
        ("add", "put"),
        (_TRACK, Param("playlist_id", "playlist", "onto {}")),
        add_to_playlist,
    ),
    Function(
        "set_volume", "media", ("set the volume",), (_ROOM, Param("percent", "percent", "to {} percent")), set_volume
    ),
    Function(
        "search_film",
        "media",
        ("find a film", "search for a film"),
        (Param("genre", "genre", "of the genre {}"),),
        search_film,
        (Gift("film_id", "film"),),
    ),
    Function("play_film", "media", ("play", "show"), (_FILM, _ROOM), play_film),
    Function("rate_film", "media", ("rate",), (_FILM, Param("stars", "count", "with {} stars")), rate_film),
)
