"""Steps from whole numbers to numbers, lists and texts."""

from __future__ import annotations

from generators.code.steps.base import INT, INTS, TEXT, step


@step(INT, INT, 1)
def reverse_digits(n: int) -> int:
    """Turn the order of its decimal digits around (leading zeros go, the sign stays)."""
    return int(str(abs(n))[::-1]) * (-1 if n < 0 else 1)


@step(INT, INT, 1)
def digit_squares(n: int) -> int:
    """Take the sum of the squares of its decimal digits."""
    return sum(int(digit) ** 2 for digit in str(abs(n)))


@step(INT, INT, 2)
def digital_root(n: int) -> int:
    """Replace it by the product of its decimal digits (without the sign) until it has one digit; count
    how often that takes."""
    n, count = abs(n), 0
    while n > 9:
        product = 1
        for digit in str(n):
            product *= int(digit)
        n, count = product, count + 1
    return count


@step(INT, INT, 2)
def halving_steps(n: int) -> int:
    """Make it 1 where it is below 1. Then, until it is 1, halve it where it is even and otherwise replace
    it by three times itself plus 1; count these steps."""
    n, count = max(n, 1), 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        count += 1
    return count


@step(INT, INT, 2)
def next_prime(n: int) -> int:
    """Take the smallest prime number that is larger than it."""
    n = max(n + 1, 2)
    while any(n % d == 0 for d in range(2, int(n**0.5) + 1)):
        n += 1
    return n


@step(INT, INT, 1)
def count_ones(n: int) -> int:
    """Take how many ones its binary digits have (without the sign)."""
    return bin(n).count("1")


@step(INT, INT, 3)
def coprime_below(n: int) -> int:
    """Take its absolute value and count the numbers from 1 up to it with which it shares no divisor but 1."""
    n = abs(n)
    count = 0
    for k in range(1, n + 1):
        a, b = n, k
        while b:
            a, b = b, a % b
        count += a == 1
    return count


@step(INT, INT, 3, first=(3, 5), second=(7, 11))
def not_payable(n: int, first: int, second: int) -> int:
    """Take its absolute value and count the amounts from 1 up to it that cannot be paid exactly with any
    number of coins of {first} and {second}."""
    payable = {0}
    for amount in range(1, abs(n) + 1):
        if amount - first in payable or amount - second in payable:
            payable.add(amount)
    return abs(n) + 1 - len(payable)


@step(INT, INT, 3)
def fewest_squares(n: int) -> int:
    """Take the fewest squares of whole numbers that add up to its absolute value (0 for 0)."""
    best = [0]
    for m in range(1, abs(n) + 1):
        best.append(1 + min(best[m - r * r] for r in range(1, int(m**0.5) + 1)))
    return best[-1]


@step(INT, INT, 3, k=(2, 4))
def last_in_circle(n: int, k: int) -> int:
    """That many people (its absolute value, and at least 1), numbered from 1, stand in a circle. Counting
    from the first, every {k}th of those left goes. Take the number of the last one left."""
    people = list(range(1, max(abs(n), 1) + 1))
    place = 0
    while len(people) > 1:
        place = (place + k - 1) % len(people)
        people.pop(place)
    return people[0]


@step(INT, INT, 4, k=(3, 5))
def ways_to_sum(n: int, k: int) -> int:
    """Take the last two decimal digits of its absolute value as a number and count the ways to write it
    as a sum of whole numbers from 1 to {k}, the order not mattering; 1 for 0."""
    n = abs(n) % 100
    ways = [1] + [0] * n
    for part in range(1, k + 1):
        for total in range(part, n + 1):
            ways[total] += ways[total - part]
    return ways[n]


@step(INT, INT, 2, k=(2, 4))
def climb_ways(n: int, k: int) -> int:
    """Take its remainder on division by 20 (0 or more) and count the ways to climb that many stairs by 1
    to {k} at a time, the order mattering; 1 for 0."""
    ways = [1]
    for _ in range(n % 20):
        ways.append(sum(ways[-k:]))
    return ways[-1]


@step(INT, INTS, 1)
def digits_of(n: int) -> list[int]:
    """Take its decimal digits, from the left (without the sign)."""
    return [int(digit) for digit in str(abs(n))]


@step(INT, INTS, 2)
def prime_factors(n: int) -> list[int]:
    """Take the prime factors of its absolute value, smallest first, each as often as it divides; none for
    0 and 1."""
    n, factors, divisor = abs(n), list[int](), 2
    while n > 1 and divisor <= n:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors


@step(INT, INTS, 1)
def divisors(n: int) -> list[int]:
    """Take all divisors of its absolute value, smallest first; none for 0."""
    return [d for d in range(1, abs(n) + 1) if n % d == 0]


@step(INT, INTS, 2, base=(3, 7))
def digits_in_base(n: int, base: int) -> list[int]:
    """Take the digits of its absolute value in base {base}, from the left; a single 0 for 0."""
    n, digits = abs(n), list[int]()
    while n >= base:
        digits.append(n % base)
        n //= base
    return [n, *digits[::-1]]


@step(INT, INTS, 3)
def fibonacci_parts(n: int) -> list[int]:
    """Write its absolute value as a sum of numbers of the row 1, 2, 3, 5, 8, 13, ... (each the sum of the
    two before), always the largest that fits first; take these numbers in that order, none for 0."""
    n, row = abs(n), [1, 2]
    while row[-1] <= n:
        row.append(row[-1] + row[-2])
    parts = []
    for part in row[::-1]:
        if part <= n:
            parts.append(part)
            n -= part
    return parts


@step(INT, INTS, 2)
def halving_path(n: int) -> list[int]:
    """Make it 1 where it is below 1, and take the numbers on its way to 1, itself and 1 included: an even
    number is halved, an odd one is replaced by itself minus 1."""
    path = [max(n, 1)]
    while path[-1] != 1:
        path.append(path[-1] // 2 if path[-1] % 2 == 0 else path[-1] - 1)
    return path


@step(INT, INTS, 3, k=(2, 6))
def look_and_say(n: int, k: int) -> list[int]:
    """Begin with the decimal digits of its absolute value and, {k} times, replace each run of equal
    digits by the length of the run followed by the digit; take the digits in the end."""
    text = str(abs(n))
    for _ in range(k):
        said, i = "", 0
        while i < len(text):
            j = i
            while j < len(text) and text[j] == text[i]:
                j += 1
            said += str(j - i) + text[i]
            i = j
        text = said
    return [int(digit) for digit in text]


@step(INT, TEXT, 2)
def roman(n: int) -> str:
    """Write its absolute value in Roman numerals (M, CM, D, CD, C, XC, L, XL, X, IX, V, IV, I); an empty
    text for 0."""
    signs = ("M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I")
    n, text = abs(n), ""
    for value, sign in zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1), signs, strict=True):
        text += sign * (n // value)
        n %= value
    return text


@step(INT, TEXT, 2)
def column_name(n: int) -> str:
    """Write its absolute value as the name of a column of a spreadsheet: 1 is A, 26 is Z, 27 is AA, 28 is
    AB; an empty text for 0."""
    n, name = abs(n), ""
    while n:
        n, rest = divmod(n - 1, 26)
        name = chr(65 + rest) + name
    return name


@step(INT, TEXT, 2)
def as_duration(n: int) -> str:
    """Read its absolute value as seconds and write it as hours, minutes and seconds like "1h2m3s",
    leaving out what is 0; an empty text for 0."""
    parts = zip((abs(n) // 3600, abs(n) // 60 % 60, abs(n) % 60), "hms", strict=True)
    return "".join(f"{value}{unit}" for value, unit in parts if value)


@step((INT, INT), INT, 2)
def shared_digits(n: int, m: int) -> int:
    """Count the decimal digits that the two numbers have in common, a digit as often as in the number
    that has it less often."""
    first, second = str(abs(n)), str(abs(m))
    return sum(min(first.count(digit), second.count(digit)) for digit in "0123456789")


@step((INT, INT), INTS, 2)
def euclid_quotients(n: int, m: int) -> list[int]:
    """While the second number is not 0: divide the first by the second, note the whole quotient, and go
    on with the second number and the remainder. Take the noted quotients, in order."""
    quotients = []
    while m:
        quotients.append(n // m)
        n, m = m, n % m
    return quotients


@step((INT, INT), INT, 3)
def carries(n: int, m: int) -> int:
    """Count how often a 1 is carried when the two numbers are added by hand, digit by digit."""
    count = carry = 0
    while n or m:
        carry = int(n % 10 + m % 10 + carry > 9)
        count += carry
        n, m = n // 10, m // 10
    return count
