# Sluice and PyTorch in an image, to train and to serve (docs/containers.md).
#
#   docker build -t sluice .
#   docker build -t sluice --build-arg TORCH=2.13.0 .
#   docker run --rm -v sluice:/run/sluice sluice run --backend host --memory 1GiB -- python3 train.py
ARG BASE=debian:12-slim

FROM ${BASE} AS build
ARG TORCH=2.11.0
WORKDIR /src
COPY scripts scripts
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates $(./scripts/setup.sh --list-packages)
RUN python3 -m venv /opt/sluice && /opt/sluice/bin/pip install --no-cache-dir "torch==${TORCH}" numpy
COPY . .
# An environment for what only building needs, which sees the torch of the other.
RUN python3 -m venv /opt/building && /opt/building/bin/pip install --no-cache-dir scikit-build-core \
    && echo /opt/sluice/lib/python3.*/site-packages > "$(echo /opt/building/lib/python3.*/site-packages)/torch.pth" \
    && /opt/building/bin/pip wheel --no-build-isolation --no-deps -w /wheel . \
    && /opt/sluice/bin/pip install --no-deps --no-index /wheel/*.whl

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/sluice /opt/sluice
RUN useradd --create-home --uid 1000 sluice && install -d -m 0700 -o sluice /run/sluice
ENV PATH=/opt/sluice/bin:$PATH SLUICE_RUNTIME_DIR=/run/sluice
USER sluice
WORKDIR /home/sluice
ENTRYPOINT ["sluice"]
CMD ["--help"]
