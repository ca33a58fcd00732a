# expect: tried
from trying import tried

total = 0
for folder in ("/box", "/tmp", "/dev/shm", "/store", "/dev", "/"):
    for number in range(100):
        try:
            with open(f"{folder}/fill-{number}", "wb", buffering=0) as file:
                for _ in range(100):
                    total += file.write(b"x" * 2**20)
        except OSError:
            break
if total > 17 * 2**20:
    print("ESCAPED wrote", total)
tried()
