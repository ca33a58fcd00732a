# expect: ended
import os

print("PASS 1.0 correct", flush=True)
os._exit(0)
