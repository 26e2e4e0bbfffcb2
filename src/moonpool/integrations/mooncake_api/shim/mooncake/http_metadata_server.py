from moonpool.integrations.mooncake_api.http_metadata_server import KVBootstrapServer, KVPoll, main, parse_args

__all__ = ["KVBootstrapServer", "KVPoll", "main", "parse_args"]

if __name__ == "__main__":
    raise SystemExit(main())
