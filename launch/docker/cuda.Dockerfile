# jtrain for NVIDIA GPUs, with the versions that CI tested. From the root of the repository:
#
#   docker build --file launch/docker/cuda.Dockerfile --tag jtrain:cuda .
#   docker run --gpus all --shm-size 16g --volume "$PWD/runs:/runs" jtrain:cuda --config=tiny --workdir=/runs/tiny
#
# The wheels bring CUDA, cuDNN and NCCL; the host has the driver and the NVIDIA Container Toolkit.
FROM python:3.12.12-slim-bookworm

# NCCL loads the libraries of InfiniBand and RoCE where they are there. The image's release pins their versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY configs configs
COPY kernels kernels
COPY jtrain jtrain
RUN pip install --no-cache-dir --constraint constraints.txt '.[cuda,gs,s3,ray]'

# /runs belongs to whoever mounts it; docker run --user "$(id -u)" writes as you.
RUN useradd --create-home --uid 1000 jtrain && install --directory --owner=jtrain /runs
USER 1000
WORKDIR /home/jtrain
# The supervisor passes `docker stop` on; give the save its time: docker stop --time 300.
ENTRYPOINT ["python", "-m", "jtrain.launch", "--supervise"]
