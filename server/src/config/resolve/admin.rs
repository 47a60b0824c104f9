//! The settings of administrators' commands: on tokens, tenants, workers and leases.

use std::time::Duration;

use tensord_transport::Secret;

use super::{Layers, pool_url::pool_url};
use crate::{
    cli::{
        ApplyArgs, LeaseCommand, TenantCommand, TenantTerms, TokenCommand, UsageArgs, WorkerCommand,
    },
    config::{
        AdminUrl, ApplyConfig, ConfigError, LeasesAction, LeasesConfig, TenantChange,
        TenantsAction, TenantsConfig, TokenAction, TokenConfig, UsageConfig, UsageFormat,
        WorkersAction, WorkersConfig, pool_file,
        settings::AdminSettings,
        values::{Name, Period},
    },
    scheduler::DEFAULT_TENANT,
};

/// Default for how long a token stays valid along with its successor.
const ROTATION_GRACE: Duration = Duration::from_secs(3600);

impl Layers<'_> {
    pub(super) fn tenants(&self, command: TenantCommand) -> Result<TenantsConfig, ConfigError> {
        let change = |Name(name), terms: TenantTerms| {
            let TenantTerms {
                weight,
                guarantee,
                limit,
                json,
                admin,
            } = terms;
            let change = TenantChange {
                name,
                weight,
                guaranteed: guarantee,
                limit,
            };
            (change, json, admin)
        };
        let (action, json, settings) = match command {
            TenantCommand::Add { name, terms } => {
                let (added, json, admin) = change(name, terms);
                (TenantsAction::Add(added), json, admin)
            }
            TenantCommand::Set { name, terms } => {
                let (changed, json, admin) = change(name, terms);
                (TenantsAction::Set(changed), json, admin)
            }
            TenantCommand::List { json, admin } => (TenantsAction::List, json, admin),
            TenantCommand::Show {
                name: Name(name),
                json,
                admin,
            } => (TenantsAction::Show(name), json, admin),
            TenantCommand::Remove {
                name: Name(name),
                json,
                admin,
            } => (TenantsAction::Remove(name), json, admin),
        };
        let admin = self.admin(settings)?;
        Ok(TenantsConfig {
            admin,
            action,
            json,
        })
    }

    pub(super) fn apply(&self, args: ApplyArgs) -> Result<ApplyConfig, ConfigError> {
        let ApplyArgs {
            file,
            dry_run,
            force,
            json,
            admin,
        } = args;
        Ok(ApplyConfig {
            tenants: pool_file::read(&file)?,
            admin: self.admin(admin)?,
            dry_run,
            force,
            json,
        })
    }

    pub(super) fn usage(&self, args: UsageArgs) -> Result<UsageConfig, ConfigError> {
        let UsageArgs {
            since,
            by: given,
            json,
            csv,
            admin,
        } = args;
        let mut by = Vec::new();
        for column in given {
            if !by.contains(&column) {
                by.push(column);
            }
        }
        Ok(UsageConfig {
            admin: self.admin(admin)?,
            since,
            by,
            format: match (json, csv) {
                (true, _) => UsageFormat::Json,
                (_, true) => UsageFormat::Csv,
                _ => UsageFormat::Table,
            },
        })
    }

    pub(super) fn token(&self, command: TokenCommand) -> Result<TokenConfig, ConfigError> {
        let (action, json, settings) = match command {
            TokenCommand::Create {
                name,
                role,
                tenant,
                user,
                note,
                expires,
                uses,
                json,
                admin,
            } => {
                let create = TokenAction::Create {
                    name: name.map(|Name(name)| name),
                    role: role.to_string(),
                    tenant: tenant.map_or_else(|| DEFAULT_TENANT.into(), |Name(tenant)| tenant),
                    user: user.map_or_else(String::new, |Name(user)| user),
                    note: note.unwrap_or_default(),
                    life: expires.map(|Period(life)| life),
                    uses,
                };
                (create, json, admin)
            }
            TokenCommand::List { json, admin } => (TokenAction::List, json, admin),
            TokenCommand::Rotate {
                name,
                grace,
                json,
                admin,
            } => {
                let Period(grace) = grace.unwrap_or(Period(ROTATION_GRACE));
                (TokenAction::Rotate { name, grace }, json, admin)
            }
            TokenCommand::Revoke {
                name,
                keep_leases,
                json,
                admin,
            } => (TokenAction::Revoke { name, keep_leases }, json, admin),
        };
        let admin = self.admin(settings)?;
        Ok(TokenConfig {
            admin,
            action,
            json,
        })
    }

    pub(super) fn workers(&self, command: WorkerCommand) -> Result<WorkersConfig, ConfigError> {
        let (action, settings) = match command {
            WorkerCommand::List { json, admin } => (WorkersAction::List { json }, admin),
            WorkerCommand::Remove { name, admin } => (WorkersAction::Remove { name }, admin),
            WorkerCommand::Drain {
                name,
                undo,
                wait,
                admin,
            } => {
                let wait = wait.map(|Period(wait)| wait);
                (WorkersAction::Drain { name, undo, wait }, admin)
            }
        };
        let admin = self.admin(settings)?;
        Ok(WorkersConfig { admin, action })
    }

    pub(super) fn leases(&self, command: LeaseCommand) -> Result<LeasesConfig, ConfigError> {
        let (action, settings) = match command {
            LeaseCommand::List { json, admin } => (LeasesAction::List { json }, admin),
            LeaseCommand::Move { lease, admin } => (LeasesAction::Move { lease }, admin),
            LeaseCommand::Suspend { lease, admin } => (LeasesAction::Suspend { lease }, admin),
            LeaseCommand::Resume { lease, admin } => (LeasesAction::Resume { lease }, admin),
            LeaseCommand::End { lease, admin } => (LeasesAction::End { lease }, admin),
            LeaseCommand::Priority {
                lease,
                priority,
                admin,
            } => (LeasesAction::Priority { lease, priority }, admin),
        };
        let admin = self.admin(settings)?;
        Ok(LeasesConfig { admin, action })
    }

    /// Resolves the source of the admin URL: the first that is set of `--url`,
    /// `--url-file`, `--state`, `TENSORD_URL` and the configuration file's `url-file`, else
    /// the state directory of this host's scheduler.
    pub(super) fn admin(&self, settings: AdminSettings) -> Result<AdminUrl, ConfigError> {
        let AdminSettings { url, file, state } = settings;
        if let Some(url) = url {
            return pool_url(&Secret::new(url), "--url".into()).map(AdminUrl::Given);
        }
        let has_url = self.environment.url.is_some() || self.file.url_file.is_some();
        match file.url_file.is_none() && (state.state.is_some() || !has_url) {
            true => self.state(state).map(AdminUrl::FromState),
            false => self.url(file).map(AdminUrl::Given),
        }
    }
}
