# Two images: `node`, a node and the command line (no torch), and `vllm`, vLLM's own image with the
# connector in it. docs/operations.md lists what of this was tried, and how; no Docker engine built it.
#
#   docker build --target node -t lookup-buffer:local .
#   docker build --target vllm -t lookup-buffer-vllm:local .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY scripts/constraints.txt scripts/
COPY lookup_buffer lookup_buffer
COPY store store
COPY connectors connectors
# The constraints are those of the tests: hatchling and what a node needs, in the versions that ran.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/src/scripts/constraints.txt
RUN pip wheel --no-deps --wheel-dir /wheels .
# An environment without pip, with compiled wheels only: neither this stage nor the next has a compiler.
RUN python -m venv --without-pip /opt/lookup-buffer \
    && pip --python /opt/lookup-buffer/bin/python install --only-binary :all: /wheels/*.whl

FROM ${PYTHON_IMAGE} AS node
# Fixed numbers, because engines of other containers and pods have to run as the same user: a node
# accepts its own user and root only. A new volume inherits the folder's owner.
RUN groupadd --gid 10001 lookup-buffer \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin lookup-buffer \
    && install -d -o 10001 -g 10001 -m 0700 /run/lookup-buffer
COPY --from=wheel /opt/lookup-buffer /opt/lookup-buffer
ENV PATH=/opt/lookup-buffer/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    LOOKUP_BUFFER_DIRECTORY=/run/lookup-buffer/node \
    LOOKUP_BUFFER_HTTP_LISTEN=http://127.0.0.1:7731
USER 10001:10001
# After SIGTERM a node removes its heartbeat, so that other nodes need not wait for their failure detector.
STOPSIGNAL SIGTERM
# Healthy or degraded; nothing should restart a node because of it (docs/metrics.md).
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:7731/healthz', timeout=2)"]
ENTRYPOINT ["lookup-buffer"]
CMD ["serve"]

FROM ${VLLM_IMAGE} AS vllm
COPY --from=wheel /wheels /wheels
# Into vLLM's own environment, whose versions stay; the wheel's dependencies are few and wide.
RUN uv pip install --system --no-cache /wheels/*.whl \
    && groupadd --gid 10001 lookup-buffer \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache lookup-buffer \
    && install -d -o 10001 -g 10001 -m 0700 /run/lookup-buffer \
    && install -d -o 10001 -g 10001 -m 0755 /cache
# The home, too: Triton and others keep there what they compile, and all else may be read only.
ENV HOME=/cache HF_HOME=/cache/huggingface VLLM_CACHE_ROOT=/cache/vllm
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["vllm", "serve"]
