# expect: tried
from trying import attempt, tried


def large():
    with open("large", "wb") as file:
        file.truncate(1 << 40)


attempt("1 TiB", large)
tried()
