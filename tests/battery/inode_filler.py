# expect: tried
from trying import tried

made = 0
for folder in ("/box", "/tmp", "/dev/shm", "/store"):
    try:
        for number in range(50_000):
            open(f"{folder}/n{number}", "w").close()
            made += 1
    except OSError:
        pass
if made > 600:
    print("ESCAPED made", made)
tried()
