# expect: failed
import sys


class Quiet(BaseException):
    def __str__(self):
        import os

        os._exit(0)


sys.excepthook = lambda *args: sys.exit(0)
raise Quiet
