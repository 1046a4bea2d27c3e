# Birthmark for an NVIDIA GPU, with the versions that it is tested with.
#
#   docker build -t birthmark .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/results:/results" birthmark make gpu OUT=/results
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/birthmark/runs" birthmark birthmark pretrain demo
#
# torch brings CUDA's libraries. The image has CUDA's compiler, for what DeepSpeed builds when it is first used: choose
# the release that torch.version.cuda names, with --build-arg CUDA=12.8.1 for example. The host needs a driver and
# NVIDIA's container toolkit.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends gcc g++ git make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /birthmark
COPY . .
RUN make setup

ENV PATH=/birthmark/.venv/bin:$PATH
CMD ["birthmark", "doctor"]
