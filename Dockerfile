# The server in a small image, run by nobody in particular.
#   docker build -t tollgate . && docker run --rm -p 127.0.0.1:8080:8080 tollgate
FROM rust:1-slim-bookworm AS build
WORKDIR /source
COPY Cargo.toml Cargo.lock README.md ./
COPY crates crates
COPY benches benches
COPY fuzz fuzz
COPY examples examples
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/source/target \
    cargo build --release --locked -p tollgate-server && cp target/release/tollgate /usr/local/bin/tollgate

FROM debian:bookworm-slim
# Whom the machine trusts, for rediss:// and TLS to PostgreSQL.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
COPY --from=build /usr/local/bin/tollgate /usr/local/bin/tollgate
USER 65532:65532
EXPOSE 8080
# Inside of a container the loopback reaches nobody, so it listens on all addresses. Give it TOLLGATE_SERVER_ADMIN_TOKEN, and it
# may drop the last word; who publishes the port decides who can ask.
ENTRYPOINT ["/usr/local/bin/tollgate"]
CMD ["serve", "--listen", "0.0.0.0:8080", "--without-token"]
# Looking at the limits takes no token and charges nothing.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s CMD ["/usr/local/bin/tollgate", "limits", "--json"]
