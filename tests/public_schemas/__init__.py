"""Public JSON schemas with instances, in the form of MaskBench: what is accepted, what refused.

A file is `{"schema": …, "tests": [{"valid": true, "data": …}, …]}`; members stand in the order of
the schema, as an answer has them.  `data` holds a sample of SchemaStore (Apache License 2.0,
https://github.com/SchemaStore/schemastore), with instances that were generated and then judged by
jsonschema-rs.
"""
