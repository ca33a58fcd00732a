# expect: tried
import io
import tarfile

from trying import attempt, target, tried

memory = io.BytesIO()
with tarfile.open(fileobj=memory, mode="w") as bomb:
    link = tarfile.TarInfo("way_out")
    link.type, link.linkname = tarfile.SYMTYPE, "/usr"
    bomb.addfile(link)
    for name in ("way_out/hello-from-inside", "../../usr/hello-from-inside", target["canary"] + "/hello-from-inside"):
        entry = tarfile.TarInfo(name)
        entry.size = 2
        bomb.addfile(entry, io.BytesIO(b"hi"))
memory.seek(0)
with tarfile.open(fileobj=memory) as bomb:
    for member in bomb.getmembers()[1:]:
        attempt(member.name, lambda member=member: open("/" + member.name.lstrip("/."), "w"))
try:
    with tarfile.open(fileobj=io.BytesIO(memory.getvalue())) as bomb:
        bomb.extractall("out")
except OSError as error:
    print("refused", error)
tried()
