# headway with its extras on NVIDIA's CUDA runtime; for a machine without a GPU:
#   docker build --build-arg BASE=debian:bookworm-slim --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t headway:cpu .
# torch's wheels bring their own CUDA libraries; the host needs an NVIDIA driver and the container toolkit. See docs/cluster.md.
ARG BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04
FROM ${BASE}

# g++ and Python's headers are for torch.compile, ssh for `headway launch ssh` and `headway board ssh://...`.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ git openssh-client python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/headway/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/headway

# torch comes first, in a layer of its own: it is the largest package and changes least.
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install "torch>=2.11,<2.14" --index-url ${TORCH_INDEX}

ARG EXTRAS=all,ray,wandb,mlflow
COPY pyproject.toml setup.py README.md LICENSE NOTICE /src/
COPY src /src/src
# The image has no .git; with this `headway --version` says the commit: --build-arg COMMIT=$(git rev-parse --short=12 HEAD)
ARG COMMIT=
RUN if [ -n "${COMMIT}" ]; then echo "${COMMIT}" > /src/src/headway/commit.txt; fi
RUN cd /src && pip install ".[${EXTRAS}]" && rm -rf /src && headway --version

RUN useradd --create-home --shell /bin/bash headway && mkdir /work && chown headway:headway /work
USER headway
WORKDIR /work
ENTRYPOINT ["headway"]
CMD ["doctor"]
