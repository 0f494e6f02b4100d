# qerl in a container, with the packages of requirements/ by version and hash.
#
#   docker build --target cpu -t qerl:cpu .
#   docker build --target gpu -t qerl:gpu .
#   docker run --gpus all --ipc=host -v "$PWD:/work" -v "$HOME/.cache:/root/.cache" qerl:gpu doctor
#
# The GPU target brings CUDA's libraries with torch; the host brings the driver and NVIDIA's container toolkit.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS uv
# Triton and torch compile small C files when they start.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/qerl
RUN python -m venv .venv
COPY requirements/uv.txt requirements/uv.txt
RUN .venv/bin/pip install --no-cache-dir --require-hashes -r requirements/uv.txt
ENV PATH="/opt/qerl/.venv/bin:$PATH" UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1 VIRTUAL_ENV=/opt/qerl/.venv

FROM uv AS packages-cpu
COPY requirements/torch-cpu.txt requirements/cpu.txt requirements/
RUN uv pip install --no-deps --torch-backend=cpu --require-hashes -r requirements/torch-cpu.txt -r requirements/cpu.txt

FROM uv AS packages-gpu
COPY requirements/gpu.txt requirements/gpu.txt
RUN uv pip install --no-deps --require-hashes -r requirements/gpu.txt

FROM packages-cpu AS cpu
COPY . .
RUN uv pip install --no-deps --no-build-isolation --editable . && qerl recipes >/dev/null
WORKDIR /work
ENTRYPOINT ["qerl"]

FROM packages-gpu AS gpu
COPY . .
RUN uv pip install --no-deps --no-build-isolation --editable . && qerl recipes >/dev/null
WORKDIR /work
ENTRYPOINT ["qerl"]
