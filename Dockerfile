# The project on a CPU, in a container. The machine needs only Docker.
#
#     docker build -t agent-rl .
#     docker run --rm agent-rl                                                   list the commands
#     docker run --rm -it -v "$PWD/runs:/agent/runs" -v "$PWD/.cache:/agent/.cache" agent-rl train
#
# Runs are written to runs/, converted models and warm starts to .cache/. Mount both to keep them.
FROM python:3.11-slim-bookworm

# vLLM's CPU build needs libnuma, and g++ to compile kernels. tcmalloc saves memory. Versions are not
# pinned, because Debian removes old ones.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 libtcmalloc-minimal4 make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /agent
ENV PIP_NO_CACHE_DIR=1

# First copy only the files that set-up reads, so that a code change does not install 4 GB again.
COPY Makefile requirements*.txt ./
COPY tools tools
COPY stubs stubs
COPY envs/textcraft/__init__.py envs/textcraft/
RUN make setup SET=cpu

COPY . .
# For an environment with extra packages: --build-arg ENV=babyai
ARG ENV=textcraft
RUN make setup ENV="$ENV"
ENTRYPOINT ["make"]
CMD ["help"]
