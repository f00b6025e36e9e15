# The project in a container. Untried: the project's own machines cannot build or run containers.
#
#   docker build -t repro .                                  # with --build-arg LIGHT=1: without torch
#   docker run --rm -v "$PWD/results:/repro/results" repro make reproduce SCALE=smoke
#   docker run --rm -p 8888:8888 repro                       # JupyterLab: open the address that it prints, with
#                                                            # localhost in place of the container's name
#
# The CUDA build of torch is taken where set-up sees an NVIDIA driver: run `make setup` once more with --gpus all.
FROM python:3.12-slim

RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home reader && install --directory --owner=reader /repro
USER reader
WORKDIR /repro
COPY --chown=reader . .

ARG LIGHT=0
RUN make setup LIGHT="$LIGHT"
ENV PATH=/repro/.venv/bin:$PATH

EXPOSE 8888
CMD ["make", "lab", "LAB=--no-browser --ip=0.0.0.0"]
