"""The recipes: how each real server is had, started and asked whether it is up."""

from __future__ import annotations

import socket
import struct
import urllib.request
from pathlib import Path

from lab.errors import Missing
from lab.install import Apt, Go, Maven, find, run
from lab.server import Image, Place, Server

JAVA = Apt("default-jre-headless", "java")


def program(name: str) -> str:
    found = find(name)
    if found is None:
        raise Missing(f"{name} is not on PATH")
    return found


def ask(port: int, question: bytes, size: int = 4096) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(question)
        return connection.recv(size)


# Redis: append-only, so that a restart keeps what was written.


def redis_command(place: Place) -> list[str]:
    here = ["--bind", "127.0.0.1", "--port", str(place.port), "--dir", str(place.data)]
    return [program("redis-server"), *here, "--save", "", "--appendonly", "yes"]


REDIS = Server(
    name="redis",
    url="redis://127.0.0.1:{port}",
    install=(Apt("redis-server", "redis-server"),),
    command=redis_command,
    ready=lambda port: ask(port, b"PING\r\n") == b"+PONG\r\n",
    image=Image("redis:7", 6379, command=("redis-server", "--save", "", "--appendonly", "yes")),
)

# Kafka: one node that is broker and controller. slf4j-simple 2 would be ignored: Kafka brings the API of 1.7.

KAFKA_JARS = Maven("kafka", ("org.apache.kafka:kafka_2.13:4.3.1", "org.slf4j:slf4j-simple:1.7.36"))
KAFKA_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    # So that a test need not wait long for a consumer to count as dead.
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "5000",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.heartbeat.interval.ms": "500",
}


def kafka_java(*words: str) -> list[str]:
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    return [program("java"), "-Xmx512m", quiet, "-cp", f"{KAFKA_JARS.lib}/*", *words]


def kafka_prepare(place: Place) -> None:
    broker, controller = (f"127.0.0.1:{port}" for port in place.ports)
    here = {
        "listeners": f"PLAINTEXT://{broker},CONTROLLER://{controller}",
        "advertised.listeners": f"PLAINTEXT://{broker}",
        "controller.quorum.voters": f"1@{controller}",
        "log.dirs": str(place.data / "logs"),
    }
    settings = kafka_settings_file(place)
    settings.write_text("".join(f"{key}={value}\n" for key, value in {**KAFKA_SETTINGS, **here}.items()))
    cluster = "cmVkcml2ZS1sYWItLS0tLQ"
    run(kafka_java("kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings)), "kafka's data folder")


def kafka_settings_file(place: Place) -> Path:
    return place.data / "server.properties"


def kafka_ready(port: int) -> bool:
    """Ask for the cluster's brokers: this one is listed only once it takes requests."""
    request = struct.pack(">hhihi", 3, 1, 7, -1, -1)  # Metadata, version 1, correlation 7, no client, all topics
    answer = ask(port, struct.pack(">i", len(request)) + request)
    return len(answer) >= 12 and struct.unpack(">i", answer[8:12])[0] > 0


KAFKA_IN_DOCKER = {f"KAFKA_{key.upper().replace('.', '_')}": value for key, value in KAFKA_SETTINGS.items()}

KAFKA = Server(
    name="kafka",
    url="kafka://127.0.0.1:{port}",
    install=(JAVA, KAFKA_JARS),
    prepare=kafka_prepare,
    command=lambda place: kafka_java("kafka.Kafka", str(kafka_settings_file(place))),
    ready=kafka_ready,
    ports=2,
    patience=60,
    image=Image(
        "apache/kafka:4.3.1",
        9092,
        env={
            **KAFKA_IN_DOCKER,
            "KAFKA_LISTENERS": "PLAINTEXT://:9092,CONTROLLER://:9093",
            "KAFKA_ADVERTISED_LISTENERS": "PLAINTEXT://127.0.0.1:{port}",
            "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@localhost:9093",
        },
    ),
)

# toxiproxy: bad networks on demand, told over HTTP. 2.5 asks for Go 1.17; 2.12 asks for 1.23, and Debian 12 has 1.19.
# No image: in a container it could not reach the servers beside it.

TOXIPROXY_PROGRAM = Go("toxiproxy", "github.com/Shopify/toxiproxy/v2/cmd/server@v2.5.0")


def toxiproxy_ready(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=1) as answer:
        return bool(answer.status == 200)


TOXIPROXY = Server(
    name="toxiproxy",
    url="http://127.0.0.1:{port}",
    install=(TOXIPROXY_PROGRAM,),
    command=lambda place: [str(TOXIPROXY_PROGRAM.program), "-host", "127.0.0.1", "-port", str(place.port)],
    ready=toxiproxy_ready,
)

SERVERS = {server.name: server for server in (REDIS, KAFKA, TOXIPROXY)}
