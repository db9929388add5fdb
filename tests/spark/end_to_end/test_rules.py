"""The rules about operations in Spark's data source: its part of the table in docs/reference/rules.md."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Client
from tests.cluster.harness import Cluster
from tests.cluster.rules.table import RULES, Ask

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster]
ASKED = {rule.rule: rule.spark for rule in RULES if rule.spark is not None}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_request_that_breaks_a_rule_gets_the_reply_of_the_table(
    spark: SparkSession, shared_cluster: Cluster, ask: Ask
) -> None:
    where = {"dataDir": str(shared_cluster.local.data_dir)}
    with Client(shared_cluster.url) as client:
        before = client.count()
        with pytest.raises(Exception, match=re.escape(f"{ask.answer}: ")):
            carry_out(spark, ask.request, where)
        assert client.count() == before


def carry_out(spark: SparkSession, request: str, where: dict[str, str]) -> None:
    """Write the rows of a query, or read with options."""
    if request.startswith("select"):
        spark.sql(request).write.format("kvstore").mode("append").options(**where).save()
        return
    options = dict(each.split("=") for each in request.split(", "))
    spark.read.format("kvstore").options(**where, **options).load().count()
