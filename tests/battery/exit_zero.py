# expect: ended
import sys

print("PASS 1.0 correct")
sys.exit(0)
