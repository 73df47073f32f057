"""Validate our configurations with AWS ParallelCluster itself, in an environment that has it.

Reads {name: configuration} as JSON from standard input, writes {name: [error]} to standard output. The schema is always
checked. If moto is installed, AWS is simulated and ParallelCluster's validators run against it: EFA of the instance type,
operating system, size of the storage. No account, no network.
"""

import json
import os
import sys
from unittest import mock

import yaml
from pcluster.aws.aws_api import AWSApi
from pcluster.schemas.cluster_schema import ClusterSchema

try:
    import moto
except ImportError:
    moto = None

BEYOND_THE_SIMULATION = {
    "KeyPairValidator",  # the key pair is the user's
    "ComputeResourceLaunchTemplateValidator",  # moto cannot dry-run the launch of an instance
    "HeadNodeLaunchTemplateValidator",
    "InstanceTypeBaseAMICompatibleValidator",  # nor does it know which regions offer an instance type
}


def problems(text: str) -> list[str]:
    """Return the errors of one configuration, by the schema and by the validators that moto supports."""
    os.environ["AWS_DEFAULT_REGION"] = yaml.safe_load(text)["Region"]
    try:
        ClusterSchema(cluster_name="paceline").load(yaml.safe_load(text))
    except Exception as error:
        return [f"schema: {error}"]
    if moto is None:
        return []
    AWSApi.reset()
    with moto.mock_aws():
        return simulated(text)


def simulated(text: str) -> list[str]:
    import boto3
    from pcluster.aws.aws_resources import CapacityReservationInfo
    from pcluster.aws.ec2 import Ec2Client
    from pcluster.validators.cluster_validators import FailureLevel
    from pcluster.validators.common import Validator, ValidatorContext

    ec2 = boto3.client("ec2")
    given = yaml.safe_load(text)
    given["HeadNode"]["Networking"]["SubnetId"] = subnet = make_network(ec2)
    given["Scheduling"]["SlurmQueues"][0]["Networking"]["SubnetIds"] = [subnet]
    images = ec2.describe_images(Owners=["amazon"])["Images"]
    image = next(image["ImageId"] for image in images if image["Architecture"] == "x86_64")
    execute = Validator.execute

    def execute_if_supported(self, *arguments, **keywords):
        try:
            return execute(self, *arguments, **keywords)
        except Exception as error:
            print(f"{self.type} could not run: {error!r}", file=sys.stderr)
            return []

    reservation = CapacityReservationInfo(
        {
            "InstanceType": given["Scheduling"]["SlurmQueues"][0]["ComputeResources"][0][
                "InstanceType"
            ],
            "InstancePlatform": "Linux/UNIX",
            "AvailabilityZone": ec2.describe_subnets(SubnetIds=[subnet])["Subnets"][0][
                "AvailabilityZone"
            ],
            "TotalInstanceCount": 2,
            "ReservationType": "capacity-block",
        }
    )
    with (
        mock.patch.object(Ec2Client, "describe_capacity_reservations", return_value=[reservation]),
        mock.patch.object(Ec2Client, "get_official_image_id", return_value=image),
        mock.patch.object(Validator, "execute", execute_if_supported),
    ):
        found = (
            ClusterSchema(cluster_name="paceline").load(given).validate(context=ValidatorContext())
        )
    return [
        f"{failure.validator_type}: {failure.message}"
        for failure in found
        if failure.level is FailureLevel.ERROR
        and failure.validator_type not in BEYOND_THE_SIMULATION
    ]


def make_network(ec2) -> str:
    """Return the ID of a new private subnet."""
    network = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    ec2.modify_vpc_attribute(VpcId=network, EnableDnsHostnames={"Value": True})
    return ec2.create_subnet(VpcId=network, CidrBlock="10.0.1.0/24")["Subnet"]["SubnetId"]


if __name__ == "__main__":
    os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none")
    json.dump({name: problems(text) for name, text in json.load(sys.stdin).items()}, sys.stdout)
