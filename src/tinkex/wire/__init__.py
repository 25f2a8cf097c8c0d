"""The wire protocol: endpoint table, JSON and protobuf codecs, error bodies."""
