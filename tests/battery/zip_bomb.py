# expect: tried
import io
import zipfile

from trying import tried

memory = io.BytesIO()
with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as bomb:
    for number in range(30):
        bomb.writestr(f"{number}.bin", bytes(2**20))
written = 0
try:
    with zipfile.ZipFile(memory) as bomb:
        for name in bomb.namelist():
            bomb.extract(name, "out")
            written += 2**20
except OSError as error:
    print("stopped", error)
if written > 17 * 2**20:
    print("ESCAPED wrote", written)
tried()
