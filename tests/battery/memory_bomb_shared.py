# expect: memory_exceeded
# Allocated pages that are in no process's page table.
import mmap
import os
import time

for _ in range(8):
    if os.fork() == 0:
        block = mmap.mmap(-1, 40 * 2**20)
        for page in range(0, len(block), 4096):
            block[page] = 1
        block.madvise(mmap.MADV_DONTNEED)
        time.sleep(60)
time.sleep(60)
