# One image for all roles (docs/image.md). With wheels in wheelhouse/ (`make wheelhouse`), it builds offline.
FROM python:3.11-slim-bookworm AS base

# The dependencies, in a file that changes only when they do, so that the slow layer after it stays cached.
FROM base AS needs
COPY pyproject.toml /
RUN python -c "import tomllib; t = tomllib.load(open('/pyproject.toml', 'rb')); \
print(*t['project']['dependencies'], *t['build-system']['requires'], sep='\n')" >/needs.txt

FROM base AS dependencies
ARG TORCH=cpu
COPY requirements.lock /build/
COPY --from=needs /needs.txt /build/
RUN --mount=type=bind,source=wheelhouse,target=/wheelhouse set -eu; \
    case "$TORCH" in cpu | cuda) ;; *) echo "TORCH=$TORCH is unknown: use cpu or cuda" >&2; exit 1 ;; esac; \
    python -m venv --without-pip /opt/venv; \
    pip="python -m pip --python /opt/venv/bin/python --no-cache-dir --disable-pip-version-check"; \
    if ls /wheelhouse/*.whl >/dev/null 2>&1; then \
        found=$(sed -n '1s/.* TORCH=\([a-z]*\).*/\1/p' /wheelhouse/requirements.txt); \
        [ "$found" = "$TORCH" ] || { echo "wheelhouse/ has TORCH=$found: make wheelhouse TORCH=$TORCH" >&2; exit 1; }; \
        source="--no-index --find-links /wheelhouse"; \
        $pip install --no-compile --no-deps --require-hashes $source -r /wheelhouse/requirements.txt; \
    else \
        source=; version=$(sed -n 's/^torch==//p' /build/requirements.lock); \
        [ "$TORCH" = cuda ] || $pip install --no-compile --no-deps \
            --index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu"; \
    fi; \
    $pip install --no-compile $source --constraint /build/requirements.lock -r /build/needs.txt; \
    $pip check
COPY scripts/slim.py /build/
RUN /opt/venv/bin/python /build/slim.py /opt/venv/lib/python3.11/site-packages

# The project, as a layer of files on top of the environment.
FROM dependencies AS project
COPY pyproject.toml README.md LICENSE /src/
COPY fl_privacy /src/fl_privacy
COPY server_app /src/server_app
COPY client_app /src/client_app
COPY shuffler_app /src/shuffler_app
COPY aggregator_app /src/aggregator_app
COPY attacks /src/attacks
RUN pip="python -m pip --python /opt/venv/bin/python --no-cache-dir --disable-pip-version-check" && \
    $pip install --no-deps --no-index --no-build-isolation --no-compile --root /layer --root-user-action ignore /src && \
    /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash -s /layer /layer/opt/venv/lib

FROM base
ARG TORCH=cpu
LABEL org.opencontainers.image.title="fl-privacy" \
      org.opencontainers.image.description="Private federated learning on Flower: every role of a federation" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.fl-privacy.torch="$TORCH"
RUN groupadd --gid 10001 fl && \
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin fl && \
    install -d -o 10001 -g 10001 -m 0700 /kit /pki && \
    install -d -o 10001 -g 10001 -m 0755 /runs /data /done
COPY --from=dependencies /opt/venv /opt/venv
# LightGBM needs a system OpenMP runtime; if the base image has none, use torch's.
RUN ldconfig -p | grep -q libgomp.so.1 || \
    cp /opt/venv/lib/python3.11/site-packages/torch/lib/libgomp*.so.1 /usr/lib/libgomp.so.1; \
    /opt/venv/bin/python -B -c "import lightgbm"
COPY configs /configs
COPY --from=project /layer /
ENV PATH=/opt/venv/bin:$PATH \
    VIRTUAL_ENV=/opt/venv \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    TMPDIR=/tmp \
    XDG_CACHE_HOME=/tmp/cache \
    MPLCONFIGDIR=/tmp/matplotlib \
    NUMBA_CACHE_DIR=/tmp/numba \
    FLWR_HOME=/tmp/flwr \
    FLWR_TELEMETRY_ENABLED=0 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /runs
STOPSIGNAL SIGTERM
# A serving role touches the file every 2 s while all its processes are alive and responding.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD ["sh", "-c", "[ $(($(date +%s) - $(stat -c %Y /kit/run/healthy 2>/dev/null || echo 0))) -lt 15 ]"]
ENTRYPOINT ["fl-privacy"]
