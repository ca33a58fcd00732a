# Before each command of the tool `shell`: its first run lets python and pytest find the code. PATHS is replaced.
if [ -z "$__ready" ]; then
  export PYTHONPATH=PATHS PYTHONDONTWRITEBYTECODE=1 PAGER=cat GIT_PAGER=cat
  command -v python >/dev/null || python() { python3 "$@"; }
  pytest() { python3 -m pytest -p no:cacheprovider -o addopts= -W ignore "$@"; }
  __ready=1
fi
