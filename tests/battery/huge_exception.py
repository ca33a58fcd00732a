# expect: failed
class Huge(Exception):
    def __str__(self):
        return "x" * 2**20 * 20 + str(self)


raise Huge
