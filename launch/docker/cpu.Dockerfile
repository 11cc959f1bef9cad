# jtrain without GPUs, with the versions that CI tested; also for TPUs. From the root of the repository:
#
#   docker build --file launch/docker/cpu.Dockerfile --tag jtrain:cpu .
#   docker build --file launch/docker/cpu.Dockerfile --build-arg EXTRAS=tpu,gs --tag jtrain:tpu .
#   docker run --shm-size 2g --volume "$PWD/runs:/runs" jtrain:cpu --config=tiny --workdir=/runs/tiny
#
# On a TPU VM: docker run --privileged --network host jtrain:tpu ...
FROM python:3.12.12-slim-bookworm

WORKDIR /src
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY configs configs
COPY kernels kernels
COPY jtrain jtrain
ARG EXTRAS=gs,s3,ray
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"

# /runs belongs to whoever mounts it; docker run --user "$(id -u)" writes as you.
RUN useradd --create-home --uid 1000 jtrain && install --directory --owner=jtrain /runs
USER 1000
WORKDIR /home/jtrain
# The supervisor passes `docker stop` on; give the save its time: docker stop --time 300.
ENTRYPOINT ["python", "-m", "jtrain.launch", "--supervise"]
