# expect: timed_out
import time

time.sleep(3600)
