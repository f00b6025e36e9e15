# The project in a container. Untried: the project's own machines cannot build or run containers.
#
#   docker build -t repro .                                  # --build-arg LIGHT=1 leaves torch out
#   docker run --rm -v "$PWD/results:/repro/results" repro make reproduce SCALE=smoke
#   docker run --rm -p 8888:8888 repro                       # JupyterLab; the address is in its output
#
# With an NVIDIA GPU set-up must see the driver, so run it in the container: `docker run --gpus all ... make setup`.
FROM python:3.12-slim

RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home reader
USER reader
WORKDIR /repro
COPY --chown=reader . .

ARG LIGHT=0
RUN make setup LIGHT="$LIGHT"
ENV PATH=/repro/.venv/bin:$PATH

EXPOSE 8888
CMD ["make", "lab", "LAB=--no-browser --ip=0.0.0.0"]
