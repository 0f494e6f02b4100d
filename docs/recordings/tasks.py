from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc


def ask(row, task_name):
    return Doc(query=row["problem"], choices=[f"#### {row['solution']}"], gold_index=0, task_name=task_name)


TASKS_TABLE = [
    LightevalTaskConfig(
        name="mine",
        prompt_function=ask,
        hf_repo="data",
        hf_subset="default",
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
        metrics=[Metrics.expr_gold_metric],
        generation_size=48,
        stop_sequence=[],
    )
]
