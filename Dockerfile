# Ludus in a container, for macOS, Windows and Linux without root:
#   docker build -t ludus .                         # --build-arg TORCH_INDEX=URL for a CPU build of torch
#   docker run --rm -it -v ludus-runs:/ludus/runs ludus                             # the demo; runs stay in the volume
#   docker run --rm -it -v ludus-runs:/ludus/runs ludus ludus show runs/search-1    # any command
# Environments that run programs of the policy need user namespaces and mounts inside the container:
#   docker run --rm -it --security-opt seccomp=unconfined --security-opt apparmor=unconfined \
#     --security-opt systempaths=unconfined ludus ludus sandbox check               # Podman: --security-opt unmask=ALL
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap gcc libc6-dev git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /ludus
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
COPY examples examples
# PyTorch's index of CPU builds as TORCH_INDEX saves gigabytes of CUDA libraries.
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0 \
    && pip install --no-cache-dir -c constraints.txt '.[guided,lora,mcp,plot,schema,serve]'
VOLUME /ludus/runs
CMD ["ludus", "train", "search", "--evaluation.tasks", "512"]
